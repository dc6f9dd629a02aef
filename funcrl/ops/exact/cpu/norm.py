"""Root-mean-square norm of rows, alone and after the residual addition."""

import torch
from torch import Tensor

from funcrl.ops.exact.cpu.sums import row_sums, wide_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> tuple[Tensor, Tensor]:
    """Return (out [M, D], scale [M]) with scale = 1 / sqrt(mean(x^2) + eps), in at least float32.

    out = (x * scale) * (weight + offset), each factor rounded to the dtype of `x`.
    """
    wide = x.to(wide_dtype(x)).contiguous()
    # Square root and quotient are rounded correctly in SIMD lanes and outside of them.
    scale = 1 / torch.sqrt(row_sums(wide * wide) / x.shape[-1] + eps)
    out = (wide * scale[:, None]).to(x.dtype)
    return out.mul_(_factor(weight, offset, x.dtype)), scale


def add_rms_norm(
    x: Tensor, delta: Tensor, weight: Tensor, eps: float, offset: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (total = x + delta [M, D], its norm [M, D], its scale [M])."""
    total = (x + delta).contiguous()
    return total, *rms_norm(total, weight, eps, offset)


def rms_norm_gradients(
    grad_out: Tensor, x: Tensor, weight: Tensor, scale: Tensor, offset: float
) -> tuple[Tensor, Tensor]:
    """Return (grad_x [M, D], grad_weight [D] in at least float32) of `rms_norm`."""
    wide = wide_dtype(x)
    normal = x.to(wide).contiguous() * scale[:, None]
    grad = grad_out.to(wide).contiguous()
    grad_weight = (grad * normal.to(x.dtype)).sum(dim=0)
    grad = grad * _factor(weight, offset, x.dtype)
    mean = row_sums(grad * normal) / x.shape[-1]
    return ((grad - normal * mean[:, None]) * scale[:, None]).to(x.dtype), grad_weight


def _factor(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    return (weight + offset if offset else weight).to(dtype)
