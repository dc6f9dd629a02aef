"""Kernels of a scan over some steps: a program owns a tile of rows, or of rows and columns.

With several programs for a tile of rows a launch is one step of `forward` or `backward`; with one
it may be any number. `replay` has all steps in one launch.

A program works on tiles of BM sequences (rows) and BH numbers of their states (columns). `X_step`
and `X_row` are the distances of two steps and of two rows of X in memory.
"""

import triton
import triton.language as tl


@triton.jit
def rows_with_state(resets, r_step, r_row, rows, t, N, RESETS: tl.constexpr):
    """Return which rows exist and go on at step t with the state of the step before."""
    known = rows < N
    if RESETS:
        known = known & (tl.load(resets + t * r_step + rows * r_row, mask=known, other=1) == 0)
    return known


@triton.jit
def state_before(initial, states, s_step, s_row, t, H: tl.constexpr):
    """Return where the states before step t lie, and the distance of two rows."""
    at = initial
    row = tl.full((), H, tl.int64)
    if t > 0:
        at = states + (t - 1) * s_step
        row = tl.cast(s_row, tl.int64)
    return at, row


@triton.jit
def tile_of(at, row, rows, columns, seen):
    """Return a tile [BM, BH] in float32, zero where it is not seen."""
    found = tl.load(at + rows[:, None] * row + columns[None, :], mask=seen, other=0.0)
    return found.to(tl.float32)


@triton.jit
def store_tile(at, row, rows, columns, seen, value):
    """Write a tile [BM, BH], rounded to the dtype of the memory."""
    tl.store(at + rows[:, None] * row + columns[None, :], value, mask=seen)


@triton.jit
def gates_of(at, row, rows, columns, seen, H: tl.constexpr):
    """Return four tiles that lie H apart."""
    return (
        tile_of(at, row, rows, columns, seen),
        tile_of(at + H, row, rows, columns, seen),
        tile_of(at + 2 * H, row, rows, columns, seen),
        tile_of(at + 3 * H, row, rows, columns, seen),
    )


@triton.jit
def store_gates(at, row, rows, columns, seen, first, second, third, fourth, H: tl.constexpr):
    """Write four tiles that lie H apart, after all threads have read what was there."""
    tl.debug_barrier()
    store_tile(at, row, rows, columns, seen, first)
    store_tile(at + H, row, rows, columns, seen, second)
    store_tile(at + 2 * H, row, rows, columns, seen, third)
    store_tile(at + 3 * H, row, rows, columns, seen, fourth)


@triton.jit
def gate_products(
    first, second, third, fourth, x, row, weight, rows, alive, columns,
    D: tl.constexpr, H: tl.constexpr, GATES: tl.constexpr,
    BH: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add x W^T [BM, BH] to the first three or four gates; x is [N, D], W is [G, D], D in order."""
    inner = tl.arange(0, BK)
    x_at = x + rows[:, None] * row + inner[None, :]
    w_at = weight + columns[None, :] * D + inner[:, None]
    WHOLE: tl.constexpr = D % BK == 0 and H % BH == 0
    for k in range(0, D, BK):
        left_seen, right_seen = alive[:, None], (columns < H)[None, :]
        if D % BK != 0:
            left_seen = left_seen & (k + inner < D)[None, :]
            right_seen = right_seen & (k + inner < D)[:, None]
        left = tl.load(x_at, mask=left_seen, other=0.0)
        right = weights_of(w_at, right_seen, WHOLE)
        first = tl.dot(left, right, first, input_precision=PRECISION)
        right = weights_of(w_at + H * D, right_seen, WHOLE)
        second = tl.dot(left, right, second, input_precision=PRECISION)
        right = weights_of(w_at + 2 * H * D, right_seen, WHOLE)
        third = tl.dot(left, right, third, input_precision=PRECISION)
        if GATES == 4:
            right = weights_of(w_at + 3 * H * D, right_seen, WHOLE)
            fourth = tl.dot(left, right, fourth, input_precision=PRECISION)
        x_at += BK
        w_at += BK
    return first, second, third, fourth


@triton.jit
def weights_of(at, seen, WHOLE: tl.constexpr):
    """Return a tile of a weight, which with WHOLE is seen everywhere."""
    return tl.load(at) if WHOLE else tl.load(at, mask=seen, other=0.0)


@triton.jit
def state_product(
    grads, row, weight, rows, alive, columns, H: tl.constexpr, GATES: tl.constexpr,
    BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return grads W [BM, BH], the gradient of h; `weight` [H, GATES H] is W transposed.

    Of three gates the last one's numbers lie at 3 H, after the gradients of r, z, and n.
    """
    G: tl.constexpr = GATES * H
    shift: tl.constexpr = (4 - GATES) * H
    inner = tl.arange(0, BK)
    g_at = grads + rows[:, None] * row
    w_at = weight + columns[None, :] * G + inner[:, None]
    total = tl.zeros((BM, BH), tl.float32)
    for k in range(0, G, BK):
        places = k + inner
        if 2 * H % BK == 0:
            moved = places + tl.where(k >= 2 * H, shift, 0)
        else:
            moved = places + tl.where(places >= 2 * H, shift, 0)
        left_seen, right_seen = alive[:, None], (columns < H)[None, :]
        if G % BK != 0:
            left_seen = left_seen & (places < G)[None, :]
            right_seen = right_seen & (places < G)[:, None]
        left = tl.load(g_at + moved[None, :], mask=left_seen, other=0.0)
        right = weights_of(w_at, right_seen, G % BK == 0 and H % BH == 0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        w_at += BK
    return total


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


# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"


@triton.jit(do_not_specialize=["N", "first", "last"])
def forward_kernel(
    first, last, x, weight_ih, bias, weight_hh, bias_n, h0, cell, resets, outputs, gates, cells, N,
    x_step, x_row, o_step, o_row, g_step, g_row, c_step, c_row, r_step, r_row,
    D: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    CELL: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, RESETS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of steps first..last, and the cell state [N, H] of an LSTM in place."""
    G: tl.constexpr = 4 if CELL == "lstm" else 3
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    for step in range(first, last):
        t = tl.cast(step, tl.int64)
        alive = rows_with_state(resets, r_step, r_row, rows, t, N, RESETS)
        h, h_row = state_before(h0, outputs, o_step, o_row, t, H)
        for start in range(tl.program_id(1) * BH, H, tl.num_programs(1) * BH):
            columns = start + tl.arange(0, BH)
            seen = (rows < N)[:, None] & (columns < H)[None, :]
            a, b, c, d = step_gates(
                x + t * x_step, x_row, weight_ih, bias, h, h_row, weight_hh, bias_n, rows, alive,
                columns, N, D, H, G, CELL, BIAS, BM, BH, BK, PRECISION,
            )  # fmt: skip
            if CELL == "lstm":
                state = tile_of(cell, H, rows, columns, seen & alive[:, None])
            else:
                state = tile_of(h, h_row, rows, columns, seen & alive[:, None])
            output, after = advanced(a, b, c, d, state, CELL)
            store_tile(outputs + t * o_step, o_row, rows, columns, seen, output)
            if CELL == "lstm":
                store_tile(cell, H, rows, columns, seen, after)
            if KEEP:
                store_gates(gates + t * g_step, g_row, rows, columns, seen, a, b, c, d, H)
            if KEEP and CELL == "lstm":
                store_tile(cells + t * c_step, c_row, rows, columns, seen, after)
        tl.debug_barrier()  # the next step reads what other threads wrote


@triton.jit(do_not_specialize=["N", "steps"])
def replay_kernel(
    x, weight_ih, bias, weight_hh, bias_n, before, cell, resets, gates, cells, N, steps,
    x_step, x_row, g_step, g_row, c_step, c_row, r_step, r_row,
    D: tl.constexpr, H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    CELL: tl.constexpr, BIAS: tl.constexpr, KEEP: tl.constexpr, RESETS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Write what `forward_kernel` writes but the outputs, of steps before which h is known."""
    G: tl.constexpr = 4 if CELL == "lstm" and KEEP else 3  # without o the state is known
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BH + tl.arange(0, BH)
    seen = (rows < N)[:, None] & (columns < H)[None, :]
    state = tl.zeros((BM, BH), tl.float32)
    if CELL == "lstm":
        state = tile_of(cell, H, rows, columns, seen)
    for step in range(steps):
        t = tl.cast(step, tl.int64)
        alive = rows_with_state(resets, r_step, r_row, rows, t, N, RESETS)
        a, b, c, d = step_gates(
            x + t * x_step, x_row, weight_ih, bias, before + t * N * H, H, weight_hh, bias_n,
            rows, alive, columns, N, D, H, G, CELL, BIAS, BM, BH, BK, PRECISION,
        )  # fmt: skip
        if KEEP:
            store_gates(gates + t * g_step, g_row, rows, columns, seen, a, b, c, d, H)
        if CELL == "lstm":
            state = tl.where(alive[:, None], state, 0.0)
            _, state = advanced(a, b, c, d, state, CELL)
        if KEEP and CELL == "lstm":
            store_tile(cells + t * c_step, c_row, rows, columns, seen, state)
    if CELL == "lstm":
        store_tile(cell, H, rows, columns, seen, state)


@triton.jit(do_not_specialize=["N", "steps", "first", "last"])
def backward_kernel(
    first, last, grad_outputs, gates, cells, before, c0, weight, resets, grad_h, carry, grads,
    N, steps,
    o_step, o_row, g_step, g_row, c_step, c_row, r_step, r_row, d_step, d_row,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, CELL: tl.constexpr,
    RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the gates of steps last..first in falling order.

    The gradient of h after a step is that of the outputs, and what the step after gives: `grad_h`
    for the last of all steps, else the product of the gradients that were written for it. In
    `carry` [N, H] is the rest of what goes to the step before: the gradient of an LSTM's cell
    state, or what a GRU's z lets through to h.
    """
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    for back in range(0, last - first):
        t = tl.cast(last - 1 - back, tl.int64)
        alive = rows_with_state(resets, r_step, r_row, rows, t, N, RESETS)
        for start in range(tl.program_id(1) * BH, H, tl.num_programs(1) * BH):
            columns = start + tl.arange(0, BH)
            seen = (rows < N)[:, None] & (columns < H)[None, :]
            if t + 1 < steps:
                goes_on = rows_with_state(resets, r_step, r_row, rows, t + 1, N, RESETS)
                grad = state_product(
                    grads + (t + 1) * d_step, d_row, weight, rows, goes_on, columns, H,
                    4 if CELL == "lstm" else 3, BM, BH, BK, PRECISION,
                )  # fmt: skip
            else:
                grad = tile_of(grad_h, H, rows, columns, seen)
            carried = tile_of(carry, H, rows, columns, seen)
            if CELL == "gru":
                grad += carried
            grad += tile_of(grad_outputs + t * o_step, o_row, rows, columns, seen)
            a, b, c, d = gates_of(gates + t * g_step, g_row, rows, columns, seen, H)
            if CELL == "lstm":
                at, row = state_before(c0, cells, c_step, c_row, t, H)
                state = tile_of(at, row, rows, columns, seen & alive[:, None])
                after = tile_of(cells + t * c_step, c_row, rows, columns, seen)
            else:
                state = tile_of(before + t * N * H, H, rows, columns, seen)
                after = state
            a, b, c, d, carried = gradients(grad, a, b, c, d, state, after, carried, CELL)
            store_gates(grads + t * d_step, d_row, rows, columns, seen, a, b, c, d, H)
            store_tile(carry, H, rows, columns, seen, tl.where(alive[:, None], carried, 0.0))
        tl.debug_barrier()  # the next step reads what other threads wrote


@triton.jit(do_not_specialize=["N"])
def state_gradient_kernel(
    grads, weight, resets, carry, grad_h0, N, d_row, r_row,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, CELL: tl.constexpr,
    RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the state h before the first step."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BH + tl.arange(0, BH)
    alive = rows_with_state(resets, 0, r_row, rows, 0, N, RESETS)
    total = state_product(
        grads, d_row, weight, rows, alive, columns, H, 4 if CELL == "lstm" else 3,
        BM, BH, BK, PRECISION,
    )  # fmt: skip
    seen = (rows < N)[:, None] & (columns < H)[None, :]
    if CELL == "gru":
        total += tile_of(carry, H, rows, columns, seen)
    store_tile(grad_h0, H, rows, columns, seen, total)
