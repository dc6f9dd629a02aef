"""The gated activation `silu(gate) * up`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import as_rows, differentiable, operator


def plain_swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, without a derivative."""
    out: Tensor = kernels_of(gate).swiglu(as_rows(gate), as_rows(up))
    return out.view(gate.shape)


def _like(gate: Tensor, _up: Tensor) -> Tensor:
    return torch.empty_like(gate, memory_format=torch.contiguous_format)


@operator("swiglu", _like, rows=(0, 1))
def swiglu_op(gate: Tensor, up: Tensor) -> Tensor:
    """Return `plain_swiglu` as an operator."""
    return plain_swiglu(gate, up)


def _like_both(_grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return _like(gate, up), _like(gate, up)


@operator("swiglu_gradients", _like_both, rows=(0, 1, 2))
def swiglu_gradients_op(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of both factors."""
    flat = (as_rows(part) for part in (grad, gate, up))
    grad_gate, grad_up = kernels_of(gate).swiglu_gradients(*flat)
    return grad_gate.view(gate.shape), grad_up.view(gate.shape)


def _forward(gate: Tensor, up: Tensor) -> tuple[Tensor]:
    return (swiglu_op(gate, up),)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> list[Tensor]:
    found = swiglu_gradients_op(grads[0], *inputs)
    return [each for each, want in zip(found, wanted, strict=True) if want]


swiglu = differentiable("swiglu", _forward, _backward, rows=(0, 1))
