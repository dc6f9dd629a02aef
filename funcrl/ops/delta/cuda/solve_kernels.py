"""What the kernels of a chunk share, and the inverse of its triangular system."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


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


@triton.jit
def solve_kernel(
    k, decay, beta, resets, inverse, T, H, CHUNKS,
    CK: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write (1 + A)^-1 [C, C] of a chunk, with A = beta (K K^T) G below the diagonal.

    Row by row: row i of the inverse is that of 1 less the sum of A[i, j] times its row j.
    """
    chunk, n = tl.program_id(0), tl.program_id(1).to(tl.int64)
    tokens, columns, places = chunk * C + tl.arange(0, C), tl.arange(0, BK), tl.arange(0, C)
    inside = tokens < T
    rows = ((n // H) * T + tokens) * H + n % H
    seen = inside[:, None] & (columns < CK)[None, :]
    keys = tl.load(k + rows[:, None] * CK + columns[None, :], mask=seen, other=0.0)
    total, sequence = load_decays(decay, resets, rows, inside)
    share = tl.load(beta + rows, mask=inside, other=0.0).to(tl.float32)
    similar = tl.dot(keys, tl.trans(keys), input_precision="ieee")
    below = places[:, None] < places[None, :]
    # The transpose of A, whose column i is multiplied with the rows of the inverse.
    kept = tl.trans(kept_between(total, sequence, C))
    system = tl.where(below, similar * kept * share[None, :], 0.0)
    found = tl.where(places[:, None] == places[None, :], 1.0, 0.0)
    for row in range(1, C):
        factors = tl.sum(tl.where(places[None, :] == row, system, 0.0), 1)
        known = tl.sum(factors[:, None] * found, 0)
        found = tl.where(places[:, None] == row, found - known[None, :], found)
    at = inverse + ((n * CHUNKS + chunk) * C + places[:, None]) * C + places[None, :]
    tl.store(at, found)
