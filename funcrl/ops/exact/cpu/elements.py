"""Operations on elements: the gate of the feed-forward layer, and rotary embedding.

A sum, product or quotient is rounded correctly wherever an element stands, and torch's `exp` has
one value too; its fused operations (silu, addcmul) differ between SIMD lanes and the rest.
"""

import torch
from torch import Tensor

from funcrl.ops.exact.cpu.sums import wide_dtype


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` [M, F], rounded once, with silu(g) = g / (1 + exp(-g))."""
    wide = gate.to(wide_dtype(gate)).contiguous()
    return (wide / torch.exp(-wide).add_(1)).mul_(up).to(gate.dtype)


def swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_gate [M, F], grad_up [M, F]) of `swiglu`."""
    wide = gate.to(wide_dtype(gate)).contiguous()
    sigmoid = 1 / torch.exp(-wide).add_(1)
    silu = wide * sigmoid
    grad = grad.to(wide.dtype)
    slope = (1 - sigmoid).mul_(silu).add_(sigmoid)
    return (slope.mul_(up).mul_(grad)).to(gate.dtype), silu.mul_(grad).to(gate.dtype)


def rotate(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    """Return x [B, H, T, C] with each pair (i, i + C/2) turned by its angle, or turned back.

    Args:
        x: [B, H, T, C].
        rotation: [2, B, T, C], the factors of an element and of its partner.
        inverse: apply the transpose.
    """
    cos, sin = rotation[:, :, None]
    wide, half = x.to(wide_dtype(x)), x.shape[-1] // 2
    partner = (wide * sin).roll(half, -1) if inverse else wide.roll(half, -1) * sin
    return (wide * cos).add_(partner).to(x.dtype).contiguous()
