"""Kernels that treat each number, or each pair of numbers, by itself: gates and rotation."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

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


@triton.jit
def rotation_kernel(
    x, rotation, out, H, T, x_b, x_h, x_t, r_two, r_b, r_t,
    HALF: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Write some heads of one token, each pair (i, i + C/2) turned by its angle."""
    token = tl.program_id(0)
    batch, time = (token // T).to(tl.int64), (token % T).to(tl.int64)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, BLOCK)
    inside = columns < HALF
    seen = (heads < H)[:, None] & inside[None, :]
    factors = rotation + batch * r_b + time * r_t + columns
    cos_low = tl.load(factors, mask=inside, other=0.0)[None, :]
    cos_high = tl.load(factors + HALF, mask=inside, other=0.0)[None, :]
    sin_low = tl.load(factors + r_two, mask=inside, other=0.0)[None, :]
    sin_high = tl.load(factors + r_two + HALF, mask=inside, other=0.0)[None, :]
    source = x + batch * x_b + time * x_t + heads[:, None].to(tl.int64) * x_h + columns[None, :]
    low = tl.load(source, mask=seen, other=0.0).to(tl.float32)
    high = tl.load(source + HALF, mask=seen, other=0.0).to(tl.float32)
    if INVERSE:
        new_low = tl.fma(high, sin_high, low * cos_low)
        new_high = tl.fma(low, sin_low, high * cos_high)
    else:
        new_low = tl.fma(high, sin_low, low * cos_low)
        new_high = tl.fma(low, sin_high, high * cos_high)
    target = ((batch * H + heads[:, None]) * T + time) * (2 * HALF) + columns[None, :]
    tl.store(out + target, new_low, mask=seen)
    tl.store(out + target + HALF, new_high, mask=seen)
