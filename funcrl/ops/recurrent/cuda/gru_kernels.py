"""Kernels of GRU: a program owns a tile of rows, or of rows and columns, for one or more steps.

Gates are in torch's order r, z, n, and then m = W_hn h + b_hn, which r multiplies. With several
programs for a tile of rows a launch is one step of `forward` or `backward`; with one it may be any
number. `replay` has all steps in one launch.
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
def _gates(
    pre, weight, bias, h, h_row, rows, alive, columns, seen,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return r, z, n and m of a step."""
    from_r, from_z, m, _ = gate_products(
        h, h_row, weight, rows, alive, columns, H, 3, BM, BH, BK, PRECISION
    )
    if BIAS:
        m += tl.load(bias + columns, mask=columns < H, other=0.0).to(tl.float32)[None, :]
    r = tl.sigmoid(from_r + tile_of(pre, 3 * H, rows, columns, seen))
    z = tl.sigmoid(from_z + tile_of(pre + H, 3 * H, rows, columns, seen))
    n = tanh(tl.fma(r, m, tile_of(pre + 2 * H, 3 * H, rows, columns, seen)))
    return r, z, n, m


@triton.jit(do_not_specialize=["N", "first", "last"])
def forward_kernel(
    pre, weight, bias, h0, resets, outputs, gates, N, first, last,
    o_step, o_row, g_step, g_row, r_step, r_row,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, KEEP: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the outputs of steps first..last; with KEEP their gates."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    for step in range(first, last):
        t = tl.cast(step, tl.int64)
        alive = rows_with_state(resets, r_step, r_row, rows, t, N, RESETS)
        h, h_row = state_before(h0, outputs, o_step, o_row, t, H)
        for start in range(tl.program_id(1) * BH, H, tl.num_programs(1) * BH):
            columns = start + tl.arange(0, BH)
            seen = (rows < N)[:, None] & (columns < H)[None, :]
            r, z, n, m = _gates(
                pre + t * N * (3 * H), weight, bias, h, h_row, rows, alive, columns, seen,
                H, BM, BH, BK, BIAS, PRECISION,
            )  # fmt: skip
            before = tile_of(h, h_row, rows, columns, seen & alive[:, None])
            output = tl.fma(z, before - n, n)
            store_tile(outputs + t * o_step, o_row, rows, columns, seen, output)
            if KEEP:
                store_gates(gates + t * g_step, g_row, rows, columns, seen, r, z, n, m, H)
        tl.debug_barrier()  # the next step reads what other threads wrote


@triton.jit(do_not_specialize=["N"])
def replay_kernel(
    pre, weight, bias, before, resets, gates, N, g_step, g_row, r_step, r_row,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    BIAS: tl.constexpr, RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gates of one step whose h is known."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BH + tl.arange(0, BH)
    t = tl.program_id(2).to(tl.int64)
    seen = (rows < N)[:, None] & (columns < H)[None, :]
    alive = rows_with_state(resets, r_step, r_row, rows, t, N, RESETS)
    r, z, n, m = _gates(
        pre + t * N * (3 * H), weight, bias, before + t * N * H, H, rows, alive, columns, seen,
        H, BM, BH, BK, BIAS, PRECISION,
    )  # fmt: skip
    store_gates(gates + t * g_step, g_row, rows, columns, seen, r, z, n, m, H)


@triton.jit(do_not_specialize=["N", "steps", "first", "last"])
def backward_kernel(
    grad_outputs, gates, before, weight, resets, grad_h, direct, grads, N, steps, first, last,
    o_step, o_row, g_step, g_row, r_step, r_row, d_step, d_row,
    H: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    RESETS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradients of `pre`, then of m, of steps last..first in falling order.

    `direct` [N, H] is carried: what z lets through to the state before a step.
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
                    grads + (t + 1) * d_step, d_row, weight, rows, goes_on, columns, H, 3,
                    BM, BH, BK, PRECISION,
                )  # fmt: skip
                grad += tile_of(direct, H, rows, columns, seen)
            else:
                grad = tile_of(grad_h, H, rows, columns, seen)
            grad += tile_of(grad_outputs + t * o_step, o_row, rows, columns, seen)
            r, z, n, m = gates_of(gates + t * g_step, g_row, rows, columns, seen, H)
            h = tile_of(before + t * N * H, H, rows, columns, seen)
            of_n = grad * (1.0 - z) * (1.0 - n * n)
            of_z = grad * (h - n) * z * (1.0 - z)
            of_r = of_n * m * r * (1.0 - r)
            at = grads + t * d_step
            store_gates(at, d_row, rows, columns, seen, of_r, of_z, of_n, of_n * r, H)
            carried = tl.where(alive[:, None], grad * z, 0.0)
            store_tile(direct, H, rows, columns, seen, carried)
        tl.debug_barrier()  # the next step reads what other threads wrote
