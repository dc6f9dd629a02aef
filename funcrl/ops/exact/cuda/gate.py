"""Gates by Triton: each number depends on two others alone."""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, fresh, row_stride
from funcrl.ops.exact.cuda.rotary import unit

_BLOCK = 1024


def swiglu_impl(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up` [M, F], rounded once (arXiv:2002.05202)."""
    return _gated(gate, up, SILU)


def swiglu_gradients_impl(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate [M, F] and up [M, F]."""
    return _gate_gradients(grad, gate, up, SILU)


def geglu_impl(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) * up` [M, F], by the GELU with tanh, rounded once (arXiv:2002.05202)."""
    return _gated(gate, up, GELU)


def geglu_gradients_impl(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of gate [M, F] and up [M, F]."""
    return _gate_gradients(grad, gate, up, GELU)


def sigmoid_gate_impl(gate: Tensor, x: Tensor) -> Tensor:
    """Return `sigmoid(gate) * x` [M, F], rounded once."""
    return _gated(gate, x, SIGMOID)


def sigmoid_gate_gradients_impl(grad: Tensor, gate: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
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


# The gates: what multiplies `up`, as a function of the gate g.
SILU = tl.constexpr(0)  # g sigmoid(g)
GELU = tl.constexpr(1)  # g sigmoid(z(g)), the GELU with tanh
SIGMOID = tl.constexpr(2)  # sigmoid(g)


@triton.jit
def gelu_exponent(g):
    """Return z with (1 + tanh(z / 2)) / 2 = sigmoid(z), as the GELU has it."""
    return (g * g * 0.044715 + 1.0) * g * 1.5957691216057308


@triton.jit
def gate_kernel(
    gate, up, out, gate_stride, up_stride, F, BLOCK: tl.constexpr, KIND: tl.constexpr
):  # fmt: skip
    """Write the gate's factor times `up` for a piece of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(gate + row * gate_stride + columns, mask=columns < F, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=columns < F, other=0.0).to(tl.float32)
    if KIND == SILU:
        product = g / (1.0 + tl.exp(-g)) * u
    elif KIND == GELU:
        product = g / (1.0 + tl.exp(-gelu_exponent(g))) * u
    else:
        product = u / (1.0 + tl.exp(-g))
    tl.store(out + row * F + columns, product, mask=columns < F)


@triton.jit
def gate_gradient_kernel(
    grad, gate, up, grad_gate, grad_up, grad_stride, gate_stride, up_stride, F,
    BLOCK: tl.constexpr, KIND: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a piece of one row: sigmoid' = s (1 - s), with s = sigmoid."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    d = tl.load(grad + row * grad_stride + columns, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(gate + row * gate_stride + columns, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if KIND == SILU:
        s = 1.0 / (1.0 + tl.exp(-g))
        of_gate, of_up = d * u * s * (1.0 + g * (1.0 - s)), d * g * s
    elif KIND == GELU:
        s = 1.0 / (1.0 + tl.exp(-gelu_exponent(g)))
        slope = (g * g * (3 * 0.044715) + 1.0) * 1.5957691216057308
        of_gate, of_up = d * u * s * (1.0 + g * (1.0 - s) * slope), d * g * s
    else:
        s = 1.0 / (1.0 + tl.exp(-g))
        of_gate, of_up = d * u * s * (1.0 - s), d * s
    tl.store(grad_gate + row * F + columns, of_gate, mask=inside)
    tl.store(grad_up + row * F + columns, of_up, mask=inside)
