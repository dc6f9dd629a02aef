"""What the kernels of a chunk share, and the inverse of its triangular system."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

_SIZE = tl.constexpr(16)  # of the blocks on the diagonal that are solved row by row


@triton.jit
def product(a, b):
    """Return a b; of float32 in three products of tensor cores, which leave its roundings."""
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def load_decays(decay, resets, rows, inside):
    """Return the sums of decays up to each token of a chunk [C], and the number of its sequence."""
    begins = tl.load(resets + rows, mask=inside, other=0).to(tl.int32)
    each = tl.load(decay + rows, mask=inside, other=0.0).to(tl.float32)
    # No sum of decays goes over a reset, so that none has its size.
    return tl.cumsum(tl.where(begins != 0, 0.0, each), 0), tl.cumsum(begins, 0)


@triton.jit
def kept_between(total, sequence, C: tl.constexpr):
    """Return G [C, C]: what token i still has of what token j, not after it, wrote."""
    places = tl.arange(0, C)
    alike = sequence[:, None] == sequence[None, :]
    alike = alike & (places[:, None] >= places[None, :])
    return tl.where(alike, tl.exp(total[:, None] - total[None, :]), 0.0)


@triton.jit
def last_of(x, C: tl.constexpr):
    """Return the last one of C numbers."""
    return tl.sum(tl.where(tl.arange(0, C) == C - 1, x, 0), 0)


@triton.jit
def kept_at_end(total, sequence, C: tl.constexpr):
    """Return G[-1] [C]: what the state after the chunk has of what token j wrote."""
    alike = sequence == last_of(sequence, C)
    return tl.where(alike, tl.exp(last_of(total, C) - total), 0.0)


@triton.jit(do_not_specialize=["T", "H", "CHUNKS"])
def solve_kernel(
    k, decay, beta, resets, inverse, T, H, CHUNKS,
    CK: tl.constexpr, BK: tl.constexpr, C: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write (1 + A)^-1 [C, C] of a chunk, with A = beta (K K^T) G below the diagonal."""
    chunk, n = tl.program_id(1), tl.program_id(0).to(tl.int64)
    tokens, columns, places = chunk * C + tl.arange(0, C), tl.arange(0, BK), tl.arange(0, C)
    inside = tokens < T
    first = ((n // H) * T + chunk * C) * H + n % H
    rows = places * H
    seen = inside[:, None] & (columns < CK)[None, :]
    keys = tl.load(k + first * CK + rows[:, None] * CK + columns[None, :], mask=seen, other=0.0)
    total, sequence = load_decays(decay + first, resets + first, rows, inside)
    share = tl.load(beta + first + rows, mask=inside, other=0.0).to(tl.float32)
    system = share[:, None] * product(keys, tl.trans(keys)) * kept_between(total, sequence, C)
    system = tl.where(places[:, None] > places[None, :], system, 0.0)
    of_chunk = inverse + (n * CHUNKS + chunk) * (C * C)
    at = places[:, None] * C + places[None, :]
    tl.store(of_chunk + at, inverse_of(system, C, PRECISION))


@triton.jit
def inverse_of(system, C: tl.constexpr, PRECISION: tl.constexpr):
    """Return X = (1 + A)^-1 of A [C, C], of which all on the diagonal and above is 0.

    By 16 rows at a time: with D the inverse of 1 + A's block on the diagonal, and R the rows of A
    before it, X's rows are D (1 - R X), in which only rows of X count that are known.
    """
    BLOCKS: tl.constexpr = C // _SIZE
    of, within, places = tl.arange(0, BLOCKS), tl.arange(0, _SIZE), tl.arange(0, C)
    by_rows = tl.reshape(system, (BLOCKS, _SIZE, C))
    blocks = tl.reshape(system, (BLOCKS, _SIZE, BLOCKS, _SIZE))
    diagonal = of[:, None, None, None] == of[None, None, :, None]
    solved = inverse_of_blocks(tl.sum(tl.where(diagonal, blocks, 0.0), 2), BLOCKS)
    found = tl.zeros((C, C), tl.float32)
    for block in range(BLOCKS):
        chosen = of[:, None, None] == block
        own = tl.sum(tl.where(chosen, solved, 0.0), 0)
        rows = tl.sum(tl.where(chosen, by_rows, 0.0), 0)
        one = tl.where(places[None, :] == block * _SIZE + within[:, None], 1.0, 0.0)
        new = one - tl.dot(rows, found, input_precision=PRECISION)
        new = tl.dot(own, new, input_precision=PRECISION)
        new = tl.broadcast_to(new[None, :, :], (BLOCKS, _SIZE, C))
        found = tl.where(places[:, None] // _SIZE == block, tl.reshape(new, (C, C)), found)
    return found


@triton.jit
def inverse_of_blocks(system, BLOCKS: tl.constexpr):
    """Return (1 + A)^-1 of each A: row i is that of 1, less A[i, j] times row j."""
    places = tl.arange(0, _SIZE)
    turned = tl.permute(system, (0, 2, 1))  # whose column i is multiplied with rows
    found = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    found = tl.broadcast_to(found[None, :, :], (BLOCKS, _SIZE, _SIZE))
    for row in range(1, _SIZE):
        factors = tl.sum(tl.where(places[None, None, :] == row, turned, 0.0), 2)
        known = tl.sum(factors[:, :, None] * found, 1)
        found = tl.where(places[None, :, None] == row, found - known[:, None, :], found)
    return found
