"""RMSNorm, alone and after a residual sum."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core.custom_op import as_rows, differentiable, operator, per_device
from funcrl.core.numerics import at_least_float32, pairwise_sum
from funcrl.ops.exact.segments import row_sums

Pair = tuple[Tensor, Tensor]
Triple = tuple[Tensor, Tensor, Tensor]


def _like_norm(x: Tensor, *_: Any) -> Pair:
    scale = x.new_empty(x.shape[:-1], dtype=at_least_float32(x.dtype))
    return torch.empty_like(x, memory_format=torch.contiguous_format), scale


@operator("rms_norm", _like_norm, rows=(0,))
def rms_norm_op(x: Tensor, weight: Tensor, eps: float, offset: float) -> Pair:
    """Return the norm of each row, and the factor that it was scaled by."""
    out, scale = rms_norm_impl(as_rows(x), weight, eps, offset)
    return out.view(x.shape), scale.view(x.shape[:-1])


def _like_add(x: Tensor, *_: Any) -> Triple:
    return torch.empty_like(x, memory_format=torch.contiguous_format), *_like_norm(x)


@operator("add_rms_norm", _like_add, rows=(0, 1))
def add_rms_norm_op(x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float) -> Triple:
    """Return the sum of two rows, its norm, and the factor that it was scaled by."""
    total, out, scale = add_rms_norm_impl(as_rows(x), as_rows(delta), weight, eps, offset)
    return total.view(x.shape), out.view(x.shape), scale.view(x.shape[:-1])


def _like_gradients(_grad: Tensor, x: Tensor, *_: Any) -> Pair:
    wide = at_least_float32(x.dtype)
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, x.new_empty(x.shape[-1], dtype=wide)


@operator("rms_norm_gradients", _like_gradients, rows=(0, 1, 3), summed=True)
def rms_norm_gradients_op(
    grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float, blocks: int
) -> Pair:
    """Return the gradients of the rows, and of the weight over all rows."""
    grad_x, grad_weight = rms_norm_gradients_impl(
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


def rms_norm_forward(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """Return `rms_norm`, without a derivative."""
    return rms_norm_impl(as_rows(x), weight, eps, offset)[0].view(x.shape)


def add_rms_norm_forward(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Return `add_rms_norm`, without a derivative."""
    total, out, _ = add_rms_norm_impl(as_rows(x), as_rows(delta), weight, eps, offset)
    return total.view(x.shape), out.view(x.shape)


@per_device
def rms_norm_impl(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return (out [M, D], scale [M]) with scale = 1 / sqrt(mean(x^2) + eps), in at least float32.

    out = (x * scale) * (weight + offset), x * scale and the weight rounded to the dtype of `x`.
    """
    wide = x.to(at_least_float32(x.dtype)).contiguous()
    # Square root and quotient are rounded correctly in SIMD lanes and outside of them.
    scale = 1 / torch.sqrt(row_sums(wide * wide) / x.shape[-1] + eps)
    out = (wide * scale[:, None]).to(x.dtype)
    return (out * _factor(weight, offset, x.dtype)).to(x.dtype), scale


@per_device
def add_rms_norm_impl(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total = x + delta [M, D], its norm [M, D], its scale [M])."""
    total = (x + delta).contiguous()
    return total, *rms_norm_impl(total, weight, eps, offset)


@per_device
def rms_norm_gradients_impl(
    grad_out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float, blocks: int = 1
) -> tuple[Tensor, Tensor]:
    """Return (grad_x [M, D], grad_weight [D] in at least float32) of `rms_norm`.

    The weight's is summed for each block of rows, and then over blocks in pairs.
    """
    wide = at_least_float32(x.dtype)
    normal = x.to(wide).contiguous() * scale[:, None]
    grad = grad_out.to(wide).contiguous()
    products = (grad * normal.to(x.dtype)).tensor_split(blocks)
    grad_weight = pairwise_sum([part.sum(dim=0) for part in products])
    grad = grad * _factor(weight, offset, x.dtype)
    mean = row_sums(grad * normal) / x.shape[-1]
    return ((grad - normal * mean[:, None]) * scale[:, None]).to(x.dtype), grad_weight


def _factor(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    rounded = weight.to(dtype)
    # A sum of 1 and a weight near 0 has more digits than half precision.
    return rounded.to(at_least_float32(dtype)) + offset if offset else rounded
