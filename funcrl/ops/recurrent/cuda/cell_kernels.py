"""The functions of LSTM and GRU on tiles in float32, forward and backward.

CELL is "lstm", with gates i, f, g, o in torch's order, or "gru": r, z, n, and then m = W_hn h + b_hn,
which r multiplies. The state of an LSTM is its cell state c, that of a GRU is h.
"""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from funcrl.ops.recurrent.cuda.step_kernels import tile_of


@triton.jit
def tanh(x):
    """Return tanh(x), which does not overflow."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


@triton.jit
def activated(
    first, second, third, fourth, pre, bias_n, rows, columns, seen,
    H: tl.constexpr, CELL: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Return the four gates, of the products with h and of what x and the biases add, `pre`."""
    row: tl.constexpr = (4 if CELL == "lstm" else 3) * H
    first = tl.sigmoid(first + tile_of(pre, row, rows, columns, seen))
    second = tl.sigmoid(second + tile_of(pre + H, row, rows, columns, seen))
    added = tile_of(pre + 2 * H, row, rows, columns, seen)
    if CELL == "lstm":
        fourth = tl.sigmoid(fourth + tile_of(pre + 3 * H, row, rows, columns, seen))
        third = tanh(third + added)
    else:
        fourth = third
        if BIAS:
            bias = tl.load(bias_n + columns, mask=columns < H, other=0.0)
            fourth += bias.to(tl.float32)[None, :]
        third = tanh(tl.fma(first, fourth, added))
    return first, second, third, fourth


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
