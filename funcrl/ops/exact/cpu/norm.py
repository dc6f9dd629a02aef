"""Root-mean-square norm of rows, alone and after the residual addition."""

import torch
from torch import Tensor

from funcrl.core.numerics import at_least_float32
from funcrl.core.pairwise import pairwise_sum
from funcrl.ops.exact.cpu.sums import row_sums


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return (out [M, D], scale [M]) with scale = 1 / sqrt(mean(x^2) + eps), in at least float32.

    out = (x * scale) * (weight + offset), x * scale and the weight rounded to the dtype of `x`.
    """
    wide = x.to(at_least_float32(x.dtype)).contiguous()
    # Square root and quotient are rounded correctly in SIMD lanes and outside of them.
    scale = 1 / torch.sqrt(row_sums(wide * wide) / x.shape[-1] + eps)
    out = (wide * scale[:, None]).to(x.dtype)
    return (out * _factor(weight, offset, x.dtype)).to(x.dtype), scale


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total = x + delta [M, D], its norm [M, D], its scale [M])."""
    total = (x + delta).contiguous()
    return total, *rms_norm(total, weight, eps, offset)


def rms_norm_gradients(
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
