"""The chunked scan by Triton, on memory in which the heads of a token lie together."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.delta.chunked import Tokens
from funcrl.ops.exact.cuda.layout import STRICT, fresh
from funcrl.ops.sequence_args import token_major

# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"


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


# What a program holds: rows of keys, filled up with zeros, and columns of a state by the bytes of a
# value's number. Triton 3.6 made an illegal access of 32 columns in half precision, so that there
# is one size for all widths, which the tests cover.
_WIDTH = 128
_COLUMNS = {2: 64, 4: 32}
# One stage leaves memory for two programs at a time.
_ONE_HEAD = {"num_warps": 4, "num_stages": 1}
_ONE_CHUNK = {"num_warps": 8, "num_stages": 1}


def scan(tokens: Tokens, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Return outputs [B, H, T, Cv] and the last state [B, H, Ck, Cv].

    Args:
        tokens: [B, H, T, ...], the resets [B, T].
        state: [B, H, Ck, Cv].
        chunk: the number of tokens that are treated at a time.
    """
    tokens = _laid_out(tokens)
    q, k, v, decay, beta, resets = tokens
    outputs, last = torch.empty_like(v), fresh(state, *state.shape)
    sizes = _sizes(tokens, chunk)
    scan_kernel[_columns(sizes, v)](
        q, k, v, decay, beta, resets, _solve(tokens, sizes), state.contiguous(), outputs, last,
        None, None, REPLAY=False, **sizes, **_ONE_HEAD, **STRICT,
    )  # fmt: skip
    return outputs, last


def scan_gradients(
    grad_outputs: Tensor, grad_state: Tensor, tokens: Tokens, state: Tensor, chunk: int
) -> tuple[Tensor, ...]:
    """Return the gradients of q, k, v, decay, beta, and of the state before the first token.

    Three passes: the states at the chunks' starts and what the tokens learn are found again, the
    gradients of the states go back from chunk to chunk, and then each chunk stands by itself.
    """
    tokens, grad_outputs = _laid_out(tokens), token_major(grad_outputs, -2)
    q, k, v, decay, beta, resets = tokens
    sizes = _sizes(tokens, chunk)
    inverse = _solve(tokens, sizes)
    learned, right, grad_v = (torch.empty_like(v) for _ in range(3))
    states = fresh(v, *inverse.shape[:2], *state.shape[-2:])
    scan_kernel[_columns(sizes, v)](
        q, k, v, decay, beta, resets, inverse, state.contiguous(), None, None, states, learned,
        REPLAY=True, **sizes, **_ONE_HEAD, **STRICT,
    )  # fmt: skip
    grad_states, grad_before = torch.empty_like(states), fresh(state, *state.shape)
    reverse_kernel[_columns(sizes, v)](
        q, k, decay, beta, resets, inverse, grad_outputs, grad_state.contiguous(), right, grad_v,
        grad_states, grad_before, **sizes, **_ONE_HEAD, **STRICT,
    )  # fmt: skip
    grad_q, grad_k, grad_decay, grad_beta = (torch.empty_like(x) for x in (q, k, decay, beta))
    gradient_kernel[(len(inverse), sizes["CHUNKS"])](
        q, k, v, decay, beta, resets, states, learned, grad_outputs, right, grad_states, grad_q,
        grad_k, grad_decay, grad_beta, **sizes, **_ONE_CHUNK, **STRICT,
    )  # fmt: skip
    return grad_q, grad_k, grad_v, grad_decay, grad_beta, grad_before


def _solve(tokens: Tokens, sizes: dict[str, int]) -> Tensor:
    """Return the inverses [N, chunks, C, C] of the chunks' systems, in the dtype of the keys."""
    _, k, _, decay, beta, resets = tokens
    chunks, chunk, rows = sizes["CHUNKS"], sizes["C"], len(k) * sizes["H"]
    inverse = fresh(k, rows, chunks, chunk, chunk)
    own: dict[str, Any] = {name: sizes[name] for name in ("T", "H", "CHUNKS", "CK", "BK", "C")}
    own["PRECISION"] = "tf32x3" if k.dtype == torch.float32 else "tf32"
    solve_kernel[(rows, chunks)](
        k, decay, beta, resets, inverse, num_warps=2, num_stages=1, **own, **STRICT
    )  # fmt: skip
    return inverse


def _laid_out(tokens: Tokens) -> Tokens:
    q, k, v = (token_major(part, -2) for part in tokens[:3])
    decay, beta = (token_major(part, -1) for part in tokens[3:5])
    resets = tokens.resets[:, None].expand(decay.shape)
    return Tokens(q, k, v, decay, beta, token_major(resets, -1))


def _sizes(tokens: Tokens, chunk: int) -> dict[str, int]:
    """Return the sizes that the kernels take, by name."""
    _, heads, length, key_width = tokens.k.shape
    return {
        "T": length, "H": heads, "CHUNKS": -(-length // chunk), "CK": key_width,
        "CV": tokens.v.shape[-1], "BK": _WIDTH, "BV": _COLUMNS[tokens.v.element_size()], "C": chunk,
    }  # fmt: skip


def _columns(sizes: dict[str, int], v: Tensor) -> tuple[int, int]:
    """Return the grid of a kernel whose programs each go along a head, for columns of its state."""
    return len(v) * sizes["H"], -(-sizes["CV"] // sizes["BV"])


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
