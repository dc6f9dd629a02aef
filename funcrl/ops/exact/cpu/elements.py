"""Operations on elements: gates, and rotary embedding.

A sum, product or quotient is rounded correctly wherever an element stands, and torch's `exp` has
one value too; its fused operations (silu, addcmul) differ between SIMD lanes and the rest.
"""

import math

import torch
from torch import Tensor

from funcrl.core.numerics import at_least_float32
from funcrl.ops.exact.cpu.sums import row_groups

# Of the GELU with tanh (arXiv:1606.08415).
_GELU_CUBIC, _GELU_SCALE = 0.044715, 2 * math.sqrt(2 / math.pi)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` [M, F], rounded once, with silu(g) = g / (1 + exp(-g))."""
    out = gate.new_empty(gate.shape)
    for rows in row_groups(*gate.shape):
        wide, part = gate[rows].to(at_least_float32(gate.dtype)), out[rows]
        if wide.dtype == out.dtype:  # in the memory of the result
            torch.div(wide, torch.neg(wide, out=part).exp_().add_(1), out=part).mul_(up[rows])
        else:
            divisor = wide.neg().exp_().add_(1)
            part.copy_(wide.div_(divisor).mul_(up[rows]))
    return out


def swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_gate [M, F], grad_up [M, F]) of `swiglu`."""
    grad_gate, grad_up = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    for rows in row_groups(*gate.shape):
        wide = gate[rows].to(at_least_float32(gate.dtype)).contiguous()
        sigmoid = wide.neg().exp_().add_(1).reciprocal_()
        silu = wide * sigmoid
        wide_grad = grad[rows].to(wide.dtype)
        slope = (1 - sigmoid).mul_(silu).add_(sigmoid)
        grad_gate[rows] = slope.mul_(up[rows]).mul_(wide_grad)
        grad_up[rows] = silu.mul_(wide_grad)
    return grad_gate, grad_up


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) * up` [M, F], rounded once, with gelu(g) = g / (1 + exp(-z(g)))."""
    out = gate.new_empty(gate.shape)
    for rows in row_groups(*gate.shape):
        wide = gate[rows].to(at_least_float32(gate.dtype)).contiguous()
        out[rows] = (wide / _gelu_exponent(wide).neg_().exp_().add_(1)).mul_(up[rows])
    return out


def geglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_gate [M, F], grad_up [M, F]) of `geglu`."""
    grad_gate, grad_up = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    for rows in row_groups(*gate.shape):
        wide = gate[rows].to(at_least_float32(gate.dtype)).contiguous()
        sigmoid = _gelu_exponent(wide).neg_().exp_().add_(1).reciprocal_()
        gelu, wide_grad = wide * sigmoid, grad[rows].to(wide.dtype)
        slope = (wide * wide).mul_(3 * _GELU_CUBIC).add_(1).mul_(_GELU_SCALE)
        slope = slope.mul_(1 - sigmoid).mul_(gelu).add_(sigmoid)
        grad_gate[rows] = slope.mul_(up[rows]).mul_(wide_grad)
        grad_up[rows] = gelu.mul_(wide_grad)
    return grad_gate, grad_up


def _gelu_exponent(x: Tensor) -> Tensor:
    """Return z with (1 + tanh(z / 2)) / 2 = 1 / (1 + exp(-z)), the factor of the GELU."""
    return (x * x).mul_(_GELU_CUBIC).add_(1).mul_(x).mul_(_GELU_SCALE)


def sigmoid_gate(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x` [M, F], rounded once."""
    out = gate.new_empty(gate.shape)
    for rows in row_groups(*gate.shape):
        wide = gate[rows].to(at_least_float32(gate.dtype)).contiguous()
        out[rows] = x[rows].to(wide.dtype) / wide.neg().exp_().add_(1)
    return out


def sigmoid_gate_gradients(grad: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_gate [M, F], grad_x [M, F]) of `sigmoid_gate`."""
    grad_gate, grad_x = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    for rows in row_groups(*gate.shape):
        wide = gate[rows].to(at_least_float32(gate.dtype)).contiguous()
        sigmoid, wide_grad = wide.neg().exp_().add_(1).reciprocal_(), grad[rows].to(wide.dtype)
        grad_gate[rows] = (1 - sigmoid).mul_(sigmoid).mul_(x[rows]).mul_(wide_grad)
        grad_x[rows] = sigmoid.mul_(wide_grad)
    return grad_gate, grad_x


def rotate(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
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
