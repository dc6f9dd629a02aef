"""Elementwise gates: `silu(gate) * up`, `gelu(gate) * up` and `sigmoid(gate) * x`."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import as_rows, differentiable, operator

Pair = tuple[Tensor, Tensor]


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, without a derivative."""
    return _by_kernel("swiglu", gate, up)


def plain_geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, by the GELU with tanh, without a derivative."""
    return _by_kernel("geglu", gate, up)


def plain_sigmoid_gate(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x`, without a derivative."""
    return _by_kernel("sigmoid_gate", gate, x)


def _by_kernel(name: str, gate: Tensor, up: Tensor) -> Tensor:
    out: Tensor = getattr(kernels_of(gate), name)(as_rows(gate), as_rows(up))
    return out.view(gate.shape)


def _like(gate: Tensor, _up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


def _like_both(_grad: Tensor, gate: Tensor, up: Tensor) -> Pair:
    return _like(gate, up), _like(gate, up)


def _differentiable(name: str, plain: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """Return a gate as an operator, whose gradients are another one."""

    @operator(name, _like, rows=(0, 1))
    def value(gate: Tensor, up: Tensor) -> Tensor:
        return plain(gate, up)

    @operator(f"{name}_gradients", _like_both, rows=(0, 1, 2))
    def gradients(grad: Tensor, gate: Tensor, up: Tensor) -> Pair:
        flat = (as_rows(part) for part in (grad, gate, up))
        grad_gate, grad_up = getattr(kernels_of(gate), f"{name}_gradients")(*flat)
        return grad_gate.view(gate.shape), grad_up.view(gate.shape)

    def forward(gate: Tensor, up: Tensor) -> tuple[Tensor]:
        return (value(gate, up),)

    def backward(
        wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
    ) -> list[Tensor]:
        found = gradients(grads[0], *inputs)
        return [each for each, want in zip(found, wanted, strict=True) if want]

    return differentiable(name, forward, backward, rows=(0, 1))


swiglu = _differentiable("swiglu", plain_swiglu)
geglu = _differentiable("geglu", plain_geglu)
sigmoid_gate = _differentiable("sigmoid_gate", plain_sigmoid_gate)
