"""The norm of each head of queries and keys and its rotation, at once."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import differentiable, operator

Pair = tuple[Tensor, Tensor]


def plain_norm_rotate(
    q: Tensor, k: Tensor, gains: Pair | None, eps: float, factors: Tensor
) -> Pair:
    """Return queries and keys [..., T, heads, C] as [..., heads, T, C], normed and rotated.

    Args:
        q: queries.
        k: keys.
        gains: the weights [C] of the norms of q and k, None for no norm.
        eps: of the norms.
        factors: [..., T, 2, C] of `rotation`.
    """
    axes = q.shape[:-3]
    parts = [_batch(part) for part in (q, k)]
    found = kernels_of(q).norm_rotate(*parts, gains, eps, _factors(factors, axes))
    turned_q, turned_k = (part.view(*axes, *part.shape[-3:]) for part in found)
    return turned_q, turned_k


def _like_turned(
    q: Tensor, k: Tensor, _q_gain: Tensor | None, _k_gain: Tensor | None, _eps: float, _: Tensor
) -> Pair:
    turned = (part.transpose(-2, -3).shape for part in (q, k))
    return q.new_empty(next(turned)), k.new_empty(next(turned))


@operator("norm_rotate", _like_turned, rows=(0, 1, 5))
def norm_rotate_op(
    q: Tensor, k: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, eps: float, factors: Tensor
) -> Pair:
    """Return `plain_norm_rotate` as an operator."""
    gains = None if q_gain is None or k_gain is None else (q_gain, k_gain)
    return plain_norm_rotate(q, k, gains, eps, factors)


def _like_gradients(_grad: Tensor, x: Tensor, gain: Tensor | None, *_: Any) -> Pair:
    width = 0 if gain is None else len(gain)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(width, dtype=numerics.at_least_float32(x.dtype))


@operator("norm_rotate_gradients", _like_gradients, rows=(0, 1, 4), summed=True)
def norm_rotate_gradients_op(
    grad: Tensor, x: Tensor, gain: Tensor | None, eps: float, factors: Tensor, blocks: int
) -> Pair:
    """Return the gradients of the rows, and of the gain over all rows: of none an empty one."""
    each = _factors(factors, x.shape[:-3])
    grad_x, grad_gain = kernels_of(x).norm_rotate_gradients(
        _batch(grad), _batch(x), gain, eps, each, blocks
    )
    if grad_gain is None:
        grad_gain = x.new_empty(0, dtype=numerics.at_least_float32(x.dtype))
    return grad_x.view(x.shape), grad_gain


def _forward(
    q: Tensor, k: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, eps: float,
    factors: Tensor, _blocks: int,
) -> Pair:  # fmt: skip
    return norm_rotate_op(q, k, q_gain, k_gain, eps, factors)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> list[Tensor]:
    q, k, q_gain, k_gain, eps, factors, blocks = inputs
    of_rows, of_gains = [], []
    for grad, x, gain in zip(grads, (q, k), (q_gain, k_gain), strict=True):
        grad_x, grad_gain = norm_rotate_gradients_op(grad, x, gain, eps, factors, blocks)
        of_rows.append(grad_x)
        of_gains.append(grad_gain if gain is None else grad_gain.to(gain.dtype))
    found = [*of_rows, *of_gains]
    return [each for each, want in zip(found, wanted, strict=False) if want]


_norm_rotate = differentiable("norm_rotate", _forward, _backward, rows=(0, 1, 5), returned=2)


def norm_rotate(
    q: Tensor, k: Tensor, gains: Pair | None, eps: float, factors: Tensor, blocks: int = 1
) -> Pair:
    """Return `plain_norm_rotate`; a gain's gradient sums each of so many blocks of rows alone."""
    q_gain, k_gain = (None, None) if gains is None else gains
    turned_q, turned_k = _norm_rotate(q, k, q_gain, k_gain, eps, factors, blocks)
    return turned_q, turned_k


def _batch(x: Tensor) -> Tensor:
    """Return [..., a, b, C] as [B, a, b, C]."""
    return x.reshape(-1, *x.shape[-3:])


def _factors(factors: Tensor, axes: Sequence[int]) -> Tensor:
    """Return factors [..., T, 2, C] as the kernels take them, [2, B, T, C]."""
    each = factors.expand(*axes, *factors.shape[-3:]).reshape(-1, *factors.shape[-3:])
    return each.permute(2, 0, 1, 3)
