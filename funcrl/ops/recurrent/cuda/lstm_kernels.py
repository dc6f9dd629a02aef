"""Kernels of LSTM: a program owns a tile of rows, or of rows and columns, for one or more steps.

Gates are in torch's order i, f, g, o. With several programs for a tile of rows a launch is one step
of `forward` or `backward`; with one it may be any number. `replay` has all steps in one launch.
"""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from funcrl.ops.recurrent.cuda.step_kernels import (
    gate_products,
    gates_of,
    rows_with_state,
    state_before,
    state_product,
    store_gates,
    store_tile,
    tanh,
    tile_of,
)


@triton.jit
def _step(
    pre, weight, h, h_row, cell, gates, g_row, rows, alive, columns, seen,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    KEEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return h and c after a step; with KEEP its gates are written."""
    from_i, from_f, from_g, from_o = gate_products(
        h, h_row, weight, rows, alive, columns, H, 4, BM, BH, BK, PRECISION
    )
    pre_i, pre_f, pre_g, pre_o = gates_of(pre, 4 * H, rows, columns, seen, H)
    i, f = tl.sigmoid(from_i + pre_i), tl.sigmoid(from_f + pre_f)
    g, o = tanh(from_g + pre_g), tl.sigmoid(from_o + pre_o)
    if KEEP:
        store_gates(gates, g_row, rows, columns, seen, i, f, g, o, H)
    cell = tl.fma(f, tl.where(alive[:, None], cell, 0.0), i * g)
    return o * tanh(cell), cell


@triton.jit(do_not_specialize=["N", "first", "last"])
def forward_kernel(
    pre, weight, h0, cell, resets, outputs, gates, cells, N, first, last,
    o_step, o_row, g_step, g_row, c_step, c_row, r_step, r_row,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    KEEP: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of steps first..last, and the cell state [N, H] in place."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    for step in range(first, last):
        t = tl.cast(step, tl.int64)
        alive = rows_with_state(resets, r_step, r_row, rows, t, N, RESETS)
        h, h_row = state_before(h0, outputs, o_step, o_row, t, H)
        for start in range(tl.program_id(1) * BH, H, tl.num_programs(1) * BH):
            columns = start + tl.arange(0, BH)
            seen = (rows < N)[:, None] & (columns < H)[None, :]
            before = tile_of(cell, H, rows, columns, seen)
            output, after = _step(
                pre + t * N * (4 * H), weight, h, h_row, before, gates + t * g_step, g_row,
                rows, alive, columns, seen, H, BM, BH, BK, KEEP, PRECISION,
            )  # fmt: skip
            store_tile(outputs + t * o_step, o_row, rows, columns, seen, output)
            store_tile(cell, H, rows, columns, seen, after)
            if KEEP:
                store_tile(cells + t * c_step, c_row, rows, columns, seen, after)
        tl.debug_barrier()  # the next step reads what other threads wrote


@triton.jit(do_not_specialize=["N", "steps"])
def replay_kernel(
    pre, weight, before, cell, resets, gates, cells, N, steps,
    g_step, g_row, c_step, c_row, r_step, r_row,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    KEEP: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the cell state after steps whose h is known in place; with KEEP all cells and gates."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BH + tl.arange(0, BH)
    seen = (rows < N)[:, None] & (columns < H)[None, :]
    after = tile_of(cell, H, rows, columns, seen)
    for step in range(steps):
        t = tl.cast(step, tl.int64)
        alive = rows_with_state(resets, r_step, r_row, rows, t, N, RESETS)
        _, after = _step(
            pre + t * N * (4 * H), weight, before + t * N * H, H, after, gates + t * g_step, g_row,
            rows, alive, columns, seen, H, BM, BH, BK, KEEP, PRECISION,
        )  # fmt: skip
        if KEEP:
            store_tile(cells + t * c_step, c_row, rows, columns, seen, after)
    store_tile(cell, H, rows, columns, seen, after)


@triton.jit(do_not_specialize=["N", "steps", "first", "last"])
def backward_kernel(
    grad_outputs, gates, cells, c0, weight, resets, grad_h, grad_cell, grads,
    N, steps, first, last,
    o_step, o_row, g_step, g_row, c_step, c_row, r_step, r_row, d_step, d_row,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `pre` of steps last..first in falling order; of the cell in place.

    The gradient of h after a step is that of the outputs, and what the step after gives: `grad_h`
    for the last of the piece, else the product of the gradients that were written for it.
    """
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    for back in range(0, last - first):
        t = tl.cast(last - 1 - back, tl.int64)
        alive = rows_with_state(resets, r_step, r_row, rows, t, N, RESETS)
        c_at, c_distance = state_before(c0, cells, c_step, c_row, t, H)
        for start in range(tl.program_id(1) * BH, H, tl.num_programs(1) * BH):
            columns = start + tl.arange(0, BH)
            seen = (rows < N)[:, None] & (columns < H)[None, :]
            if t + 1 < steps:
                goes_on = rows_with_state(resets, r_step, r_row, rows, t + 1, N, RESETS)
                grad = state_product(
                    grads + (t + 1) * d_step, d_row, weight, rows, goes_on, columns, H, 4,
                    BM, BH, BK, PRECISION,
                )  # fmt: skip
            else:
                grad = tile_of(grad_h, H, rows, columns, seen)
            grad += tile_of(grad_outputs + t * o_step, o_row, rows, columns, seen)
            i, f, g, o = gates_of(gates + t * g_step, g_row, rows, columns, seen, H)
            tanh_c = tanh(tile_of(cells + t * c_step, c_row, rows, columns, seen))
            before = tile_of(c_at, c_distance, rows, columns, seen & alive[:, None])
            of_cell = tile_of(grad_cell, H, rows, columns, seen)
            of_cell += grad * o * (1.0 - tanh_c * tanh_c)
            of_i, of_f = of_cell * g * i * (1.0 - i), of_cell * before * f * (1.0 - f)
            of_g, of_o = of_cell * i * (1.0 - g * g), grad * tanh_c * o * (1.0 - o)
            at = grads + t * d_step
            store_gates(at, d_row, rows, columns, seen, of_i, of_f, of_g, of_o, H)
            carried = tl.where(alive[:, None], of_cell * f, 0.0)
            store_tile(grad_cell, H, rows, columns, seen, carried)
        tl.debug_barrier()  # the next step reads what other threads wrote
