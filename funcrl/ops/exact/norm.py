"""RMSNorm, alone and after a residual sum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import as_rows, differentiable, operator

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def _like_norm(x: Tensor, *_: Any) -> Pair:
    scale = x.new_empty(x.shape[:-1], dtype=numerics.at_least_float32(x.dtype))
    return torch.empty_like(x, memory_format=torch.contiguous_format), scale


@operator("rms_norm", _like_norm, rows=(0,))
def rms_norm_op(x: Tensor, weight: Tensor, eps: float, offset: float) -> Pair:
    """Return the norm of each row, and the factor that it was scaled by."""
    out, scale = kernels_of(x).rms_norm(as_rows(x), weight, eps, offset)
    return out.view(x.shape), scale.view(x.shape[:-1])


def _like_add(x: Tensor, *_: Any) -> Triple:
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_like_norm(x)


@operator("add_rms_norm", _like_add, rows=(0, 1))
def add_rms_norm_op(x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float) -> Triple:
    """Return the sum of two rows, its norm, and the factor that it was scaled by."""
    total, out, scale = kernels_of(x).add_rms_norm(as_rows(x), as_rows(delta), weight, eps, offset)
    return total.view(x.shape), out.view(x.shape), scale.view(x.shape[:-1])


def _like_gradients(_grad: Tensor, x: Tensor, *_: Any) -> Pair:
    wide = numerics.at_least_float32(x.dtype)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(x.shape[-1], dtype=wide)


@operator("rms_norm_gradients", _like_gradients, rows=(0, 1, 3), summed=True)
def rms_norm_gradients_op(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float, blocks: int
) -> Pair:
    """Return the gradients of the rows, and of the weight over all rows."""
    grad_x, grad_weight = kernels_of(x).rms_norm_gradients(
        as_rows(grad), as_rows(x), weight, scale.reshape(-1), offset, blocks
    )
    return grad_x.view(x.shape), grad_weight


def _norm_forward(x: Tensor, weight: Tensor, eps: float, offset: float, _blocks: int) -> Pair:
    return rms_norm_op(x, weight, eps, offset)


def _norm_backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    x, weight, _, offset, blocks = inputs
    grad_x, grad_weight = rms_norm_gradients_op(grads[0], x, weight, results[1], offset, blocks)
    found = [grad_x, grad_weight.to(weight.dtype)]
    return [each for each, want in zip(found, wanted, strict=False) if want]


def _add_forward(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float, _blocks: int
) -> Triple:
    return add_rms_norm_op(x, delta, weight, eps, offset)


def _add_backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    (grad_total, grad_out), (total, _, scale) = grads, results
    _, _, weight, _, offset, blocks = inputs
    grad_x, grad_weight = rms_norm_gradients_op(grad_out, total, weight, scale, offset, blocks)
    both = grad_total + grad_x
    found = [both, both, grad_weight.to(weight.dtype)]
    return [each for each, want in zip(found, wanted, strict=False) if want]


_rms_norm = differentiable("rms_norm", _norm_forward, _norm_backward, rows=(0,))
_add_rms_norm = differentiable("add_rms_norm", _add_forward, _add_backward, (0, 1), returned=2)


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0, blocks: int = 1) -> Tensor:
    """Return `x / sqrt(mean(x^2) + eps) * (weight + offset)`.

    The weight's gradient sums each of so many blocks of rows for itself.
    """
    out: Tensor = _rms_norm(x, weight, eps, offset, blocks)
    return out


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0, blocks: int = 1
) -> tuple[Tensor, Tensor]:
    """Return `x + delta` and its `rms_norm`."""
    total, out = _add_rms_norm(x, delta, weight, eps, offset, blocks)
    return total, out


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return `rms_norm`, without a derivative."""
    out: Tensor = kernels_of(x).rms_norm(as_rows(x), weight, eps, offset)[0]
    return out.view(x.shape)


def plain_add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return `add_rms_norm`, without a derivative."""
    total, out, _ = kernels_of(x).add_rms_norm(as_rows(x), as_rows(delta), weight, eps, offset)
    return total.view(x.shape), out.view(x.shape)
