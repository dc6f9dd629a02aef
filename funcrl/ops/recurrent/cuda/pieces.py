"""Kernels of a scan over some steps: a program owns a tile of rows, or of rows and columns.

With several programs for a tile of rows a launch is one step of `forward` or `backward`; with one
it may be any number. `replay` has all steps in one launch.
"""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from funcrl.ops.recurrent.cuda.steps import (
    advanced,
    gates_of,
    gradients,
    rows_with_state,
    state_before,
    state_product,
    step_gates,
    store_gates,
    store_tile,
    tile_of,
)


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
