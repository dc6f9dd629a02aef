"""Gates and rotary positions by Triton: each number depends on one or two others alone."""

from typing import Any

from torch import Tensor

from funcrl.ops.exact.cuda.gate_kernels import (
    GELU,
    SIGMOID,
    SILU,
    gate_gradient_kernel,
    gate_kernel,
    rotation_kernel,
)
from funcrl.ops.exact.cuda.layout import STRICT, fresh, power_of_two, row_stride

_BLOCK = 1024
_HEADS = 32  # of one token, that a program turns


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` [M, F], rounded once (arXiv:2002.05202)."""
    return _gated(gate, up, SILU)


def swiglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate [M, F] and up [M, F]."""
    return _gate_gradients(grad, gate, up, SILU)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) * up` [M, F], by the GELU with tanh, rounded once (arXiv:2002.05202)."""
    return _gated(gate, up, GELU)


def geglu_gradients(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate [M, F] and up [M, F]."""
    return _gate_gradients(grad, gate, up, GELU)


def sigmoid_gate(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x` [M, F], rounded once."""
    return _gated(gate, x, SIGMOID)


def sigmoid_gate_gradients(grad: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate [M, F] and x [M, F]."""
    return _gate_gradients(grad, gate, x, SIGMOID)


def _gated(gate: Tensor, up: Tensor, kind: Any) -> Tensor:
    size, width = gate.shape
    gate, up = unit(gate), unit(up)
    out = fresh(gate, size, width)
    if out.numel():
        gate_kernel[(size, -(-width // _BLOCK))](
            gate, up, out, row_stride(gate), row_stride(up), width, BLOCK=_BLOCK, KIND=kind.value,
            **STRICT,
        )  # fmt: skip
    return out


def _gate_gradients(grad: Tensor, gate: Tensor, up: Tensor, kind: Any) -> tuple[Tensor, Tensor]:
    size, width = gate.shape
    grad, gate, up = unit(grad), unit(gate), unit(up)
    grad_gate, grad_up = fresh(gate, size, width), fresh(up, size, width)
    if grad_gate.numel():
        gate_gradient_kernel[(size, -(-width // _BLOCK))](
            grad, gate, up, grad_gate, grad_up, row_stride(grad), row_stride(gate), row_stride(up),
            width, BLOCK=_BLOCK, KIND=kind.value, **STRICT,
        )  # fmt: skip
    return grad_gate, grad_up


def rotate(x: Tensor, rotation: Tensor, inverse: bool) -> Tensor:
    """Return `x` [B, H, T, C] turned by `rotation` [2, B, T, C], or turned back (arXiv:2104.09864).

    The inverse is the transpose, which the backward pass needs.
    """
    batch, heads, length, width = x.shape
    x, rotation = unit(x), unit(rotation)
    out = fresh(x, batch, heads, length, width)
    block = power_of_two(width // 2)
    group = min(_HEADS, power_of_two(heads))
    if out.numel():
        rotation_kernel[(batch * length, -(-heads // group))](
            x, rotation, out, heads, length, *x.stride()[:3], *rotation.stride()[:3],
            HALF=width // 2, BLOCK=block, HEADS=group, INVERSE=inverse, **STRICT,
        )  # fmt: skip
    return out


def unit(x: Tensor) -> Tensor:
    """Return `x`, copied where the numbers of a row do not lie one after another."""
    return x if x.stride(-1) == 1 else x.contiguous()
