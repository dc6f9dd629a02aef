"""Rotary positions: factors that no compiler computes anew; rotation, alone and after a norm."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.custom_op import differentiable, operator, per_device
from funcrl.core.numerics import at_least_float32
from funcrl.ops.arithmetic import rotary_angles, rotary_factors
from funcrl.ops.exact.norm import rms_norm_gradients_impl, rms_norm_impl


def rotation_forward(
    positions: Tensor, head_width: int, theta: float, scaling: Sequence[float] = ()
) -> Tensor:
    """Return the factors [..., T, 2, C]: cosines, and sines with their signs."""
    # Each position's cosines are elementwise; flat, so that their place in a vector is alike.
    factors = rotary_factors(rotary_angles(positions.reshape(-1), head_width, theta, scaling))
    return factors.transpose(0, 1).reshape(*positions.shape, 2, head_width)


def _like_factors(positions: Tensor, head_width: int, *_: Any) -> Tensor:
    return positions.new_empty(*positions.shape, 2, head_width, dtype=torch.float32)


@operator("rotation", _like_factors, rows=(0,))
def rotation_op(
    positions: Tensor, head_width: int, theta: float, scaling: Sequence[float]
) -> Tensor:
    """Return `rotation_forward` as an operator."""
    return rotation_forward(positions, head_width, theta, scaling).contiguous()


def rotation(
    positions: Tensor, head_width: int, theta: float, scaling: Sequence[float] = ()
) -> Tensor:
    """Return the factors [..., T, 2, C] of positions [..., T]."""
    factors: Tensor = rotation_op(positions, head_width, theta, list(scaling))
    return factors


def _turn(x: Tensor, factors: Tensor, inverse: bool) -> Tensor:
    """Return [..., heads, T, C] rotated by factors [..., T, 2, C], or back."""
    rows = x.reshape(-1, *x.shape[-3:])
    each = factors.expand(*x.shape[:-3], *factors.shape[-3:]).reshape(-1, *factors.shape[-3:])
    return rotate_impl(rows, each.permute(2, 0, 1, 3), inverse).view(x.shape)


def _like(x: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@operator("rotate", _like, rows=(0, 1))
def rotate_op(x: Tensor, factors: Tensor, inverse: bool) -> Tensor:
    """Return `x` rotated, as an operator."""
    return _turn(x, factors, inverse)


def _rotate_forward(x: Tensor, factors: Tensor) -> tuple[Tensor]:
    return (rotate_op(x, factors, False),)


def _rotate_backward(
    _wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> list[Tensor]:
    return [rotate_op(grads[0], inputs[1], True)]


_rotate = differentiable("rotate", _rotate_forward, _rotate_backward, rows=(0, 1))


def rotate(parts: Sequence[Tensor], factors: Tensor) -> Sequence[Tensor]:
    """Return each of several [..., heads, T, C] rotated by the factors of `rotation`."""
    return [_rotate(part, factors) for part in parts]


def rotate_forward(parts: Sequence[Tensor], factors: Tensor) -> Sequence[Tensor]:
    """Return `rotate`, without a derivative."""
    return [_turn(part, factors, False) for part in parts]


@per_device
def rotate_impl(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    """Return x [B, H, T, C] with each pair (i, i + C/2) turned by its angle, or turned back.

    Args:
        x: [B, H, T, C].
        rotation: [2, B, T, C], the factors of an element and of its partner.
        inverse: apply the transpose.
    """
    cos, sin = rotation[:, :, None]
    wide, half = x.to(at_least_float32(x.dtype)), x.shape[-1] // 2
    partner = (wide * sin).roll(half, -1) if inverse else wide.roll(half, -1) * sin
    return (wide * cos).add_(partner).to(x.dtype).contiguous()


Pair = tuple[Tensor, Tensor]


def norm_rotate_forward(
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
    found = norm_rotate_impl(_batch(q), _batch(k), gains, eps, _factors(factors, axes))
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
    """Return `norm_rotate_forward` as an operator."""
    gains = None if q_gain is None or k_gain is None else (q_gain, k_gain)
    return norm_rotate_forward(q, k, gains, eps, factors)


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
    grad_x, grad_gain = norm_rotate_gradients_impl(_batch(grad), _batch(x), gain, eps, each, blocks)
    if grad_gain is None:
        grad_gain = x.new_empty(0, dtype=numerics.at_least_float32(x.dtype))
    return grad_x.view(x.shape), grad_gain


def _norm_rotate_forward(
    q: Tensor, k: Tensor, q_gain: Tensor | None, k_gain: Tensor | None, eps: float,
    factors: Tensor, _blocks: int,
) -> Pair:  # fmt: skip
    return norm_rotate_op(q, k, q_gain, k_gain, eps, factors)


def _norm_rotate_backward(
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


_norm_rotate = differentiable(
    "norm_rotate", _norm_rotate_forward, _norm_rotate_backward, rows=(0, 1, 5), returned=2
)


def norm_rotate(
    q: Tensor, k: Tensor, gains: Pair | None, eps: float, factors: Tensor, blocks: int = 1
) -> Pair:
    """Return `norm_rotate_forward`; a gain's gradient sums each of so many blocks of rows alone."""
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


@per_device
def norm_rotate_impl(
    q: Tensor, k: Tensor, gains: Sequence[Tensor] | None, eps: float, rotation: Tensor
) -> tuple[Tensor, Tensor]:
    """Return q [B, T, H, C] and k [B, T, K, C] as [B, H, T, C]: normed, then rotated.

    Args:
        q: queries of each token.
        k: keys of each token.
        gains: the weights [C] of the two norms, None for no norm.
        eps: of the norms.
        rotation: [2, B, T, C].
    """
    if gains is not None:
        q, k = (
            rms_norm_impl(part.reshape(-1, part.shape[-1]), gain, eps, 0.0)[0].view(part.shape)
            for part, gain in zip((q, k), gains, strict=True)
        )
    return rotate_impl(q.transpose(1, 2), rotation, False), rotate_impl(
        k.transpose(1, 2), rotation, False
    )


@per_device
def norm_rotate_gradients_impl(
    grad: Tensor, x: Tensor, gain: Tensor | None, eps: float, rotation: Tensor, blocks: int = 1
) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of x [B, T, H, C] and, in at least float32, of the gain if there is one.

    Args:
        grad: [B, H, T, C].
        x: queries or keys of each token.
        gain: the weight [C] of their norm, None for no norm.
        eps: of the norm.
        rotation: [2, B, T, C].
        blocks: of rows, each of which is summed for itself, and then they are added in pairs.
    """
    turned = rotate_impl(grad, rotation, True).transpose(1, 2)
    if gain is None:
        return turned.contiguous(), None
    rows = x.reshape(-1, x.shape[-1])
    _, scale = rms_norm_impl(rows, gain, eps, 0.0)
    grads = rms_norm_gradients_impl(turned.reshape(rows.shape), rows, gain, scale, 0.0, blocks)
    return grads[0].view(x.shape), grads[1]
