"""The chunked scan: one program goes through the chunks of a head, for some columns of its state.

Everything that has an axis of tokens lies in memory as [B, T, H, ...]; states and inverses, of one
chunk each, as [N, chunks, ...] with N = B H.
"""
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
def scan_kernel(
    q, k, v, decay, beta, resets, inverse, state, outputs, last, states, learned, T, H, CHUNKS,
    CK: tl.constexpr, CV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
    REPLAY: tl.constexpr,
):  # fmt: skip
    """Write the outputs and the last state; or, as a replay, each chunk's state and what it learns.

    U = (1 + A)^-1 beta (V - s K S), outputs s Q S + ((Q K^T) G) U, S = s[-1] S + (G[-1] K)^T U.
    """
    n = tl.program_id(0).to(tl.int64)
    wide, columns = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    places = tl.arange(0, C)
    of_state = wide[:, None] * CV + columns[None, :]
    within = (wide < CK)[:, None] & (columns < CV)[None, :]
    memory = tl.load(state + n * (CK * CV) + of_state, mask=within, other=0.0)
    for chunk in range(CHUNKS):
        tokens = chunk * C + places
        inside = tokens < T
        first = ((n // H) * T + chunk * C) * H + n % H
        rows = places * H
        narrow = inside[:, None] & (wide < CK)[None, :]
        of_keys = rows[:, None] * CK + wide[None, :]
        of_values = rows[:, None] * CV + columns[None, :]
        filled = inside[:, None] & (columns < CV)[None, :]
        keys = tl.load(k + first * CK + of_keys, mask=narrow, other=0.0)
        values = tl.load(v + first * CV + of_values, mask=filled, other=0.0).to(tl.float32)
        share = tl.load(beta + first + rows, mask=inside, other=0.0).to(tl.float32)
        total, sequence = load_decays(decay + first, resets + first, rows, inside)
        start = tl.where(sequence == 0, tl.exp(total), 0.0)
        solved = inverse + (n * CHUNKS + chunk) * (C * C)
        solved += places[:, None] * C + places[None, :]
        held = memory.to(keys.dtype)
        if REPLAY:
            at = states + (n * CHUNKS + chunk) * (CK * CV) + of_state
            tl.store(at, held, mask=within)
        missing = values - start[:, None] * product(keys, held)
        right = (share[:, None] * missing).to(keys.dtype)
        new = product(tl.load(solved), right)
        if REPLAY:
            tl.store(learned + first * CV + of_values, new, mask=filled)
        else:
            queries = tl.load(q + first * CK + of_keys, mask=narrow, other=0.0)
            scores = product(queries, tl.trans(keys))
            scores = (scores * kept_between(total, sequence, C)).to(keys.dtype)
            read = start[:, None] * product(queries, held)
            read += product(scores, new.to(keys.dtype))
            tl.store(outputs + first * CV + of_values, read, mask=filled)
        written = (kept_at_end(total, sequence, C)[:, None] * new).to(keys.dtype)
        memory = memory * last_of(start, C)
        memory += product(tl.trans(keys), written)
    if not REPLAY:
        tl.store(last + n * (CK * CV) + of_state, memory, mask=within)


@triton.jit(do_not_specialize=["T", "H", "CHUNKS"])
def reverse_kernel(
    q, k, decay, beta, resets, inverse, grad_outputs, grad_last, grad_right, grad_v, grad_states,
    grad_state, T, H, CHUNKS,
    CK: tl.constexpr, CV: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the values, of the right side of each system, and of each state."""
    n = tl.program_id(0).to(tl.int64)
    wide, columns = tl.arange(0, BK), tl.program_id(1) * BV + tl.arange(0, BV)
    places = tl.arange(0, C)
    of_state = wide[:, None] * CV + columns[None, :]
    within = (wide < CK)[:, None] & (columns < CV)[None, :]
    grad = tl.load(grad_last + n * (CK * CV) + of_state, mask=within, other=0.0)
    for step in range(CHUNKS):
        chunk = CHUNKS - 1 - step
        tokens = chunk * C + places
        inside = tokens < T
        first = ((n // H) * T + chunk * C) * H + n % H
        rows = places * H
        narrow = inside[:, None] & (wide < CK)[None, :]
        of_keys = rows[:, None] * CK + wide[None, :]
        of_values = rows[:, None] * CV + columns[None, :]
        filled = inside[:, None] & (columns < CV)[None, :]
        keys = tl.load(k + first * CK + of_keys, mask=narrow, other=0.0)
        queries = tl.load(q + first * CK + of_keys, mask=narrow, other=0.0)
        given = tl.load(grad_outputs + first * CV + of_values, mask=filled, other=0.0)
        share = tl.load(beta + first + rows, mask=inside, other=0.0).to(tl.float32)
        total, sequence = load_decays(decay + first, resets + first, rows, inside)
        start = tl.where(sequence == 0, tl.exp(total), 0.0)
        solved = inverse + (n * CHUNKS + chunk) * (C * C)
        solved += places[:, None] * C + places[None, :]
        held = grad.to(keys.dtype)
        tl.store(grad_states + (n * CHUNKS + chunk) * (CK * CV) + of_state, held, mask=within)
        scores = product(queries, tl.trans(keys))
        scores = (scores * kept_between(total, sequence, C)).to(keys.dtype)
        new = product(keys, held)
        new = kept_at_end(total, sequence, C)[:, None] * new
        new += product(tl.trans(scores), given)
        right = product(tl.trans(tl.load(solved)), new.to(keys.dtype))
        tl.store(grad_right + first * CV + of_values, right, mask=filled)
        missing = share[:, None] * right
        tl.store(grad_v + first * CV + of_values, missing, mask=filled)
        read_q = (start[:, None] * given.to(tl.float32)).to(keys.dtype)
        read_k = (start[:, None] * missing).to(keys.dtype)
        grad = grad * last_of(start, C)
        grad += product(tl.trans(queries), read_q)
        grad -= product(tl.trans(keys), read_k)
    tl.store(grad_state + n * (CK * CV) + of_state, grad, mask=within)
