"""What the kernels of all cells share: a step's products, its rows that have a state, its functions.

A program works on tiles of BM sequences (rows) and BH numbers of their states (columns). It reads
`step` and `row`, the distances of two steps and of two rows, for each tensor that has some.
"""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    """Return tanh(x), which does not overflow."""
    return 2.0 * tl.sigmoid(2.0 * x) - 1.0


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
def gates_of(at, row, rows, columns, seen, H: tl.constexpr):
    """Return the tiles of four numbers that lie H apart."""
    return (
        tile_of(at, row, rows, columns, seen),
        tile_of(at + H, row, rows, columns, seen),
        tile_of(at + 2 * H, row, rows, columns, seen),
        tile_of(at + 3 * H, row, rows, columns, seen),
    )


@triton.jit
def store_tile(at, row, rows, columns, seen, value):
    """Write a tile [BM, BH], rounded to the dtype of the memory."""
    tl.store(at + rows[:, None] * row + columns[None, :], value, mask=seen)


@triton.jit
def store_gates(at, row, rows, columns, seen, first, second, third, fourth, H: tl.constexpr):
    """Write four tiles that lie H apart; what other threads read from this memory is read by now."""
    tl.debug_barrier()
    store_tile(at, row, rows, columns, seen, first)
    store_tile(at + H, row, rows, columns, seen, second)
    store_tile(at + 2 * H, row, rows, columns, seen, third)
    store_tile(at + 3 * H, row, rows, columns, seen, fourth)


@triton.jit
def gate_products(
    h, row, weight, rows, alive, columns, H: tl.constexpr, GATES: tl.constexpr,
    BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return h W^T [BM, BH] for three or four gates (else the last is zero), K in order."""
    inner = tl.arange(0, BK)
    h_at = h + rows[:, None] * row + inner[None, :]
    w_at = weight + columns[None, :] * H + inner[:, None]
    first = tl.zeros((BM, BH), tl.float32)
    second = tl.zeros((BM, BH), tl.float32)
    third = tl.zeros((BM, BH), tl.float32)
    fourth = tl.zeros((BM, BH), tl.float32)
    for k in range(0, H, BK):
        left_seen = alive[:, None]
        if H % BK != 0:
            left_seen = left_seen & (k + inner < H)[None, :]
        left = tl.load(h_at, mask=left_seen, other=0.0)
        if H % BK == 0 and H % BH == 0:
            w_r, w_s, w_t = tl.load(w_at), tl.load(w_at + H * H), tl.load(w_at + 2 * H * H)
        else:
            seen = (columns < H)[None, :] & (k + inner < H)[:, None]
            w_r = tl.load(w_at, mask=seen, other=0.0)
            w_s = tl.load(w_at + H * H, mask=seen, other=0.0)
            w_t = tl.load(w_at + 2 * H * H, mask=seen, other=0.0)
        first = tl.dot(left, w_r, first, input_precision=PRECISION)
        second = tl.dot(left, w_s, second, input_precision=PRECISION)
        third = tl.dot(left, w_t, third, input_precision=PRECISION)
        if GATES == 4:
            if H % BK == 0 and H % BH == 0:
                w_u = tl.load(w_at + 3 * H * H)
            else:
                w_u = tl.load(w_at + 3 * H * H, mask=seen, other=0.0)
            fourth = tl.dot(left, w_u, fourth, input_precision=PRECISION)
        h_at += BK
        w_at += BK
    return first, second, third, fourth


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
        left_seen = alive[:, None]
        if G % BK != 0:
            left_seen = left_seen & (places < G)[None, :]
        left = tl.load(g_at + moved[None, :], mask=left_seen, other=0.0)
        if G % BK == 0 and H % BH == 0:
            right = tl.load(w_at)
        else:
            seen = (columns < H)[None, :] & (places < G)[:, None]
            right = tl.load(w_at, mask=seen, other=0.0)
        total = tl.dot(left, right, total, input_precision=PRECISION)
        w_at += BK
    return total


@triton.jit(do_not_specialize=["N"])
def state_gradient_kernel(
    grads, weight, resets, direct, grad_h0, N, g_row, r_row,
    H: tl.constexpr, GATES: tl.constexpr, BM: tl.constexpr, BH: tl.constexpr, BK: tl.constexpr,
    RESETS: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write the gradient of the state before the first step, with `direct` added if there is one."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BH + tl.arange(0, BH)
    alive = rows_with_state(resets, 0, r_row, rows, 0, N, RESETS)
    total = state_product(
        grads, g_row, weight, rows, alive, columns, H, GATES, BM, BH, BK, PRECISION
    )
    seen = (rows < N)[:, None] & (columns < H)[None, :]
    if DIRECT:
        total += tile_of(direct, H, rows, columns, seen)
    store_tile(grad_h0, H, rows, columns, seen, total)
