"""The functions of LSTM and GRU on tiles in float32, forward and backward.

CELL is "lstm", with gates i, f, g, o in torch's order, or "gru": r, z, n, and m = W_hn h + b_hn,
which r multiplies. The state of an LSTM is its cell state c, that of a GRU is h.
"""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from funcrl.ops.recurrent.cuda.step_kernels import gate_products


@triton.jit
def tanh(x):
    """Return tanh(x), which does not overflow."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def bias_of(bias, columns, H: tl.constexpr):
    """Return the part [1, BH] of a bias [H]."""
    return tl.load(bias + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]


@triton.jit
def step_gates(
    x, x_row, weight_ih, bias, h, h_row, weight_hh, bias_n, rows, alive, columns, N,
    D: tl.constexpr, H: tl.constexpr, GATES: tl.constexpr, CELL: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the four gates of a step; with three GATES of an LSTM the last is not computed."""
    a = tl.zeros((BM, BH), tl.float32)
    b, c, d = a, a, a
    a, b, c, d = gate_products(
        a, b, c, d, x, x_row, weight_ih, rows, rows < N, columns, D, H, GATES, BH, BK, PRECISION
    )
    if CELL == "gru":  # r is between the two products of n
        d, c = c, d
    a, b, c, d = gate_products(
        a, b, c, d, h, h_row, weight_hh, rows, alive, columns, H, H, GATES, BH, BK, PRECISION
    )
    if BIAS:
        a += bias_of(bias, columns, H)
        b += bias_of(bias + H, columns, H)
        if CELL == "lstm":
            c += bias_of(bias + 2 * H, columns, H)
            if GATES == 4:
                d += bias_of(bias + 3 * H, columns, H)
        else:
            d += bias_of(bias + 2 * H, columns, H)
            c += bias_of(bias_n, columns, H)
    a, b = tl.sigmoid(a), tl.sigmoid(b)
    if CELL == "lstm":
        c, d = tanh(c), tl.sigmoid(d)
    else:
        c, d = tanh(tl.fma(a, c, d)), c
    return a, b, c, d


@triton.jit
def advanced(first, second, third, fourth, state, CELL: tl.constexpr):
    """Return the output and the state after a step."""
    if CELL == "lstm":
        state = tl.fma(second, state, first * third)
        output = fourth * tanh(state)
    else:
        state = tl.fma(second, state - third, third)
        output = state
    return output, state


@triton.jit
def gradients(
    grad, first, second, third, fourth, state, after, carried, CELL: tl.constexpr
):  # fmt: skip
    """Return the gradients of the four gates before activation, and what is carried on.

    `grad` is that of the output; `state` and `after` those before and after the step (GRU: only the
    first). `carried` is the gradient of the cell state of an LSTM.
    """
    if CELL == "lstm":
        tanh_c = tanh(after)
        carried += grad * fourth * (1.0 - tanh_c * tanh_c)
        of_first = carried * third * first * (1.0 - first)
        of_second = carried * state * second * (1.0 - second)
        of_third = carried * first * (1.0 - third * third)
        of_fourth = grad * tanh_c * fourth * (1.0 - fourth)
        carried = carried * second
    else:
        of_third = grad * (1.0 - second) * (1.0 - third * third)
        of_first = of_third * fourth * first * (1.0 - first)
        of_second = grad * (state - third) * second * (1.0 - second)
        of_fourth = of_third * first
        carried = grad * second
    return of_first, of_second, of_third, of_fourth, carried
