"""The gradients of the tokens of each chunk by itself, once those of the states are known."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from funcrl.ops.delta.cuda.solve_kernels import (
    kept_at_end,
    kept_between,
    last_of,
    load_decays,
    product,
)


@triton.jit(do_not_specialize=["T", "H", "CHUNKS"])
def gradient_kernel(
    q, k, v, decay, beta, resets, states, learned, grad_outputs, grad_right, grad_states,
    grad_q, grad_k, grad_decay, grad_beta, T, H, CHUNKS,
    CK: tl.constexpr, CV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the gradients of q, k, decay and beta of one chunk of one head."""
    chunk, n = tl.program_id(1), tl.program_id(0).to(tl.int64)
    wide, places = tl.arange(0, BK), tl.arange(0, C)
    tokens = chunk * C + places
    inside = tokens < T
    first = ((n // H) * T + chunk * C) * H + n % H
    rows = places * H
    narrow = inside[:, None] & (wide < CK)[None, :]
    of_keys = rows[:, None] * CK + wide[None, :]
    of_chunk = (n * CHUNKS + chunk) * (CK * CV)
    # Sums over the columns of values: of scores, of similarities, and of rows of q and k.
    of_scores = tl.zeros((C, C), tl.float32)
    of_similar = tl.zeros((C, C), tl.float32)
    read_q = tl.zeros((C, BK), tl.float32)
    read_k = tl.zeros((C, BK), tl.float32)
    written = tl.zeros((C, BK), tl.float32)
    of_beta = tl.zeros((C,), tl.float32)
    of_state_kept = 0.0
    for column in range(0, CV, BV):
        columns = column + tl.arange(0, BV)
        filled = inside[:, None] & (columns < CV)[None, :]
        within = (wide < CK)[:, None] & (columns < CV)[None, :]
        of_values = rows[:, None] * CV + columns[None, :]
        of_state = wide[:, None] * CV + columns[None, :]
        memory = tl.load(states + of_chunk + of_state, mask=within, other=0.0)
        grad = tl.load(grad_states + of_chunk + of_state, mask=within, other=0.0)
        values = tl.load(v + first * CV + of_values, mask=filled, other=0.0).to(tl.float32)
        new = tl.load(learned + first * CV + of_values, mask=filled, other=0.0)
        given = tl.load(grad_outputs + first * CV + of_values, mask=filled, other=0.0)
        right = tl.load(grad_right + first * CV + of_values, mask=filled, other=0.0)
        of_scores += product(given, tl.trans(new))
        of_similar -= product(right, tl.trans(new))
        read_q += product(given, tl.trans(memory))
        read_k -= product(right, tl.trans(memory))
        written += product(new, tl.trans(grad))
        of_beta += tl.sum(right.to(tl.float32) * values, 1)
        of_state_kept += tl.sum(memory.to(tl.float32) * grad.to(tl.float32))
    keys = tl.load(k + first * CK + of_keys, mask=narrow, other=0.0)
    queries = tl.load(q + first * CK + of_keys, mask=narrow, other=0.0)
    share = tl.load(beta + first + rows, mask=inside, other=0.0).to(tl.float32)
    total, sequence = load_decays(decay + first, resets + first, rows, inside)
    kept = kept_between(total, sequence, C)
    end = kept_at_end(total, sequence, C)
    start = tl.where(sequence == 0, tl.exp(total), 0.0)
    read_q = start[:, None] * read_q
    read_k = start[:, None] * read_k
    written = end[:, None] * written
    # Each sum of decays is in an exponent: of a pair, of a read of the state, of a write.
    of_scores = of_scores * kept
    of_similar = tl.where(places[:, None] > places[None, :], of_similar * kept, 0.0)
    pairs = of_similar * product(keys, tl.trans(keys))
    of_reads = tl.sum(read_k * keys.to(tl.float32), 1)
    of_beta += of_reads + tl.sum(pairs, 1)
    pairs = share[:, None] * pairs
    pairs += of_scores * product(queries, tl.trans(keys))
    of_writes = tl.sum(written * keys.to(tl.float32), 1)
    of_total = tl.sum(pairs, 1) - tl.sum(pairs, 0) - of_writes + share * of_reads
    of_total += tl.sum(read_q * queries.to(tl.float32), 1)
    at_end = tl.sum(of_writes, 0) + last_of(start, C) * of_state_kept
    of_total += tl.where(places == C - 1, at_end, 0.0)
    begins = tl.load(resets + first + rows, mask=inside, other=0)
    of_decay = tl.where(begins != 0, 0.0, tl.cumsum(of_total, 0, reverse=True))
    tl.store(grad_decay + first + rows, of_decay, mask=inside)
    tl.store(grad_beta + first + rows, of_beta, mask=inside)
    scores = of_scores.to(keys.dtype)
    similar = share[:, None] * of_similar
    similar = (similar + tl.trans(similar)).to(keys.dtype)
    read_q += product(scores, keys)
    tl.store(grad_q + first * CK + of_keys, read_q, mask=narrow)
    read_k = share[:, None] * read_k + written
    read_k += product(similar, keys)
    read_k += product(tl.trans(scores), queries)
    tl.store(grad_k + first * CK + of_keys, read_k, mask=narrow)
