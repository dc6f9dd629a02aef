"""Elementwise gates: `silu(gate) * up`, `gelu(gate) * up` and `sigmoid(gate) * x`."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core.custom_op import as_rows, differentiable, operator, per_device
from funcrl.core.numerics import at_least_float32
from funcrl.ops.exact.segments import row_groups

Pair = tuple[Tensor, Tensor]


def _like(gate: Tensor, _up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _like_both(_grad: Tensor, gate: Tensor, up: Tensor) -> Pair:
    return _like(gate, up), _like(gate, up)


def _gate(
    name: str,
    impl: Callable[[Tensor, Tensor], Tensor],
    gradients_impl: Callable[[Tensor, Tensor, Tensor], Pair],
) -> tuple[Callable[[Tensor, Tensor], Tensor], Callable[..., Any]]:
    """Return a gate without a derivative, and one with it."""

    def gate_forward(gate: Tensor, up: Tensor) -> Tensor:
        return impl(as_rows(gate), as_rows(up)).view(gate.shape)

    gate_forward.__qualname__ = f"{name}_forward"  # by which another process finds it

    @operator(name, _like, rows=(0, 1))
    def value(gate: Tensor, up: Tensor) -> Tensor:
        return gate_forward(gate, up)

    @operator(f"{name}_gradients", _like_both, rows=(0, 1, 2))
    def gradients(grad: Tensor, gate: Tensor, up: Tensor) -> Pair:
        grad_gate, grad_up = gradients_impl(as_rows(grad), as_rows(gate), as_rows(up))
        return grad_gate.view(gate.shape), grad_up.view(gate.shape)

    def forward(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (value(gate, up),)

    def backward(
        wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
    ) -> list[Tensor]:
        found = gradients(grads[0], *inputs)
        return [each for each, want in zip(found, wanted, strict=True) if want]

    return gate_forward, differentiable(name, forward, backward, rows=(0, 1))


# Of the GELU with tanh (arXiv:1606.08415).
_GELU_CUBIC, _GELU_SCALE = 0.044715, 2 * math.sqrt(2 / math.pi)


@per_device
def swiglu_impl(gate: Tensor, up: Tensor) -> Tensor:
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


@per_device
def swiglu_gradients_impl(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
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


@per_device
def geglu_impl(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) * up` [M, F], rounded once, with gelu(g) = g / (1 + exp(-z(g)))."""
    out = gate.new_empty(gate.shape)
    for rows in row_groups(*gate.shape):
        wide = gate[rows].to(at_least_float32(gate.dtype)).contiguous()
        out[rows] = (wide / _gelu_exponent(wide).neg_().exp_().add_(1)).mul_(up[rows])
    return out


@per_device
def geglu_gradients_impl(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
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


@per_device
def sigmoid_gate_impl(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x` [M, F], rounded once."""
    out = gate.new_empty(gate.shape)
    for rows in row_groups(*gate.shape):
        wide = gate[rows].to(at_least_float32(gate.dtype)).contiguous()
        out[rows] = x[rows].to(wide.dtype) / wide.neg().exp_().add_(1)
    return out


@per_device
def sigmoid_gate_gradients_impl(grad: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (grad_gate [M, F], grad_x [M, F]) of `sigmoid_gate`."""
    grad_gate, grad_x = gate.new_empty(gate.shape), gate.new_empty(gate.shape)
    for rows in row_groups(*gate.shape):
        wide = gate[rows].to(at_least_float32(gate.dtype)).contiguous()
        sigmoid, wide_grad = wide.neg().exp_().add_(1).reciprocal_(), grad[rows].to(wide.dtype)
        grad_gate[rows] = (1 - sigmoid).mul_(sigmoid).mul_(x[rows]).mul_(wide_grad)
        grad_x[rows] = sigmoid.mul_(wide_grad)
    return grad_gate, grad_x


swiglu_forward, swiglu = _gate("swiglu", swiglu_impl, swiglu_gradients_impl)
geglu_forward, geglu = _gate("geglu", geglu_impl, geglu_gradients_impl)
sigmoid_gate_forward, sigmoid_gate = _gate(
    "sigmoid_gate", sigmoid_gate_impl, sigmoid_gate_gradients_impl
)
