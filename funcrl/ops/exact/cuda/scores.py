"""Scores of rows of logits by Triton, their gradients, and a draw of a token from each row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, aligned_rows, fresh, power_of_two, row_stride

_PIECE = 8192  # logits that one program sums
_BLOCK = 4096  # logits that one program writes


def logsumexp_impl(logits: Tensor, temperature: float) -> Tensor:
    """Return the log of the sum of exp(logits / temperature) over each row, float32 [M]."""
    return _scores(logits, None, temperature)[2]


def scores_impl(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of targets, entropies and normalisers, each float32 [M].

    A target outside of [0, V) has the log-probability NaN.
    """
    return _scores(logits, targets, temperature)


def log_softmax_impl(logits: Tensor, temperature: float) -> Tensor:
    """Return logits / temperature - logsumexp, float32 [M, V]."""
    size, width = logits.shape
    logits = aligned_rows(logits)
    normaliser = logsumexp_impl(logits, temperature)
    out = fresh(logits, size, width, dtype=torch.float32)
    if size:
        log_softmax_kernel[(size, -(-width // _BLOCK))](
            logits, normaliser, out, row_stride(logits), width, temperature,
            BLOCK=_BLOCK, DIVIDE=temperature != 1.0, num_warps=8, **STRICT,
        )  # fmt: skip
    return out


def scores_gradients_impl(
    logits: Tensor,
    targets: Tensor,
    entropy: Tensor,
    normaliser: Tensor,
    grad_logprob: Tensor,
    grad_entropy: Tensor,
    temperature: float,
) -> Tensor:
    """Return the gradient of logits [M, V], given those of log-probabilities and entropies [M]."""
    size, width = logits.shape
    logits = aligned_rows(logits)
    rows = (targets, entropy, normaliser, grad_logprob, grad_entropy)
    out = fresh(logits, size, width)
    if size:
        score_gradient_kernel[(size, -(-width // _BLOCK))](
            logits, *[part.contiguous() for part in rows], out, row_stride(logits), width,
            temperature, BLOCK=_BLOCK, DIVIDE=temperature != 1.0, num_warps=8, **STRICT,
        )  # fmt: skip
    return out


def draw(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return a token of each row [M] by inverting its cumulative distribution, and its `scores`.

    The log-probability is that of logits / temperature. A token depends on its row and on its
    number in [0, 1), float64, alone.
    """
    size, width = logits.shape
    logits = aligned_rows(logits)
    tokens = fresh(logits, size, dtype=torch.int64)
    parts = _parts(logits, temperature)
    pieces = parts.shape[1]
    if size:
        draw_kernel[(size,)](
            parts, logits, uniforms.contiguous(), tokens, row_stride(logits), width, temperature,
            pieces,
            BLOCK=power_of_two(pieces), PIECE=_PIECE, DIVIDE=temperature != 1.0, num_warps=8,
            **STRICT,
        )  # fmt: skip
    return tokens, _scores_of_parts(parts, logits, tokens, temperature)[0]


def _scores(
    logits: Tensor, targets: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `scores`, or only the normaliser where there are no targets; its bits are the same."""
    logits = aligned_rows(logits)
    return _scores_of_parts(_parts(logits, temperature), logits, targets, temperature)


def _parts(logits: Tensor, temperature: float) -> Tensor:
    """Return what is known of each piece of each row [M, pieces, 3]."""
    size, width = logits.shape
    pieces = -(-width // _PIECE)
    parts = fresh(logits, size, pieces, 3, dtype=torch.float32)
    if size:
        piece_kernel[(size, pieces)](
            logits, parts, row_stride(logits), width, temperature,
            BLOCK=_PIECE, DIVIDE=temperature != 1.0, num_warps=8, **STRICT,
        )  # fmt: skip
    return parts


def _scores_of_parts(
    parts: Tensor, logits: Tensor, targets: Tensor | None, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    size, width = logits.shape
    logprob, entropy, normaliser = (fresh(logits, size, dtype=torch.float32) for _ in range(3))
    pieces = parts.shape[1]
    chosen = logits if targets is None else targets.contiguous()
    if size:
        score_kernel[(size,)](
            parts, logits, chosen, logprob, entropy, normaliser, row_stride(logits), width,
            temperature, pieces, BLOCK=power_of_two(pieces), DIVIDE=temperature != 1.0,
            TARGETS=targets is not None, num_warps=1, **STRICT,
        )  # fmt: skip
    return logprob, entropy, normaliser


@triton.jit
def scaled(logits, temperature, DIVIDE: tl.constexpr):
    """Return logits / temperature in float32, correctly rounded."""
    wide = logits.to(tl.float32)
    if DIVIDE:
        wide = tl.div_rn(wide, temperature)
    return wide


@triton.jit
def piece_kernel(logits, parts, stride, V, temperature, BLOCK: tl.constexpr, DIVIDE: tl.constexpr):
    """Write, for a piece of a row: its maximum m, sum of e = exp(z - m), sum of e (z - m)."""
    row, piece = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = piece * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + columns, mask=columns < V, other=-float("inf"))
    z = scaled(value, temperature, DIVIDE)
    # The least maximum is finite, so that a piece of -inf has sums of 0 and not NaN.
    m = tl.maximum(tl.max(z, 0), -1e38)
    shifted = z - m
    e = tl.exp(shifted)
    weighted = e * tl.where(e == 0.0, 0.0, shifted)  # -inf * 0 is NaN
    target = parts + (row * tl.num_programs(1) + piece) * 3
    tl.store(target, m)
    tl.store(target + 1, tl.sum(e, 0))
    tl.store(target + 2, tl.sum(weighted, 0))


@triton.jit
def score_kernel(
    parts, logits, targets, logprob, entropy, normaliser, stride, V, temperature, PIECES,
    BLOCK: tl.constexpr, DIVIDE: tl.constexpr, TARGETS: tl.constexpr,
):  # fmt: skip
    """Write the scores of one row from the sums of its pieces."""
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, BLOCK)
    source = parts + (row * PIECES + pieces) * 3
    m = tl.load(source, mask=pieces < PIECES, other=-1e38)
    s = tl.load(source + 1, mask=pieces < PIECES, other=0.0)
    t = tl.load(source + 2, mask=pieces < PIECES, other=0.0)
    top = tl.max(m, 0)
    away = m - top
    share = tl.exp(away)
    total = tl.sum(s * share, 0)
    surprise = tl.sum(share * tl.fma(s, away, t), 0)
    log_total = tl.log(total)
    result = top + log_total
    tl.store(normaliser + row, result)
    if TARGETS:
        tl.store(entropy + row, log_total - surprise / total)
        target = tl.load(targets + row)
        inside = (target >= 0) & (target < V)
        chosen = tl.load(logits + row * stride + target, mask=inside, other=float("nan"))
        tl.store(logprob + row, scaled(chosen, temperature, DIVIDE) - result)


@triton.jit
def log_softmax_kernel(
    logits, normaliser, out, stride, V, temperature, BLOCK: tl.constexpr, DIVIDE: tl.constexpr
):
    """Write z - normaliser for a piece of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + columns, mask=columns < V, other=0.0)
    result = scaled(value, temperature, DIVIDE) - tl.load(normaliser + row)
    tl.store(out + row * V + columns, result, mask=columns < V)


@triton.jit
def score_gradient_kernel(
    logits, targets, entropy, normaliser, grad_logprob, grad_entropy, out, stride, V, temperature,
    BLOCK: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Write, for a piece of a row, (onehot - p) d logprob - p (log p + H) d entropy."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(logits + row * stride + columns, mask=columns < V, other=-float("inf"))
    logp = scaled(value, temperature, DIVIDE) - tl.load(normaliser + row)
    p = tl.exp(logp)
    from_logprob, from_entropy = tl.load(grad_logprob + row), tl.load(grad_entropy + row)
    if DIVIDE:
        from_logprob, from_entropy = from_logprob / temperature, from_entropy / temperature
    surprise = p * tl.where(p == 0.0, 0.0, logp + tl.load(entropy + row))
    result = -(p * from_logprob) - surprise * from_entropy
    result = tl.where(columns == tl.load(targets + row), result + from_logprob, result)
    tl.store(out + row * V + columns, result, mask=columns < V)


@triton.jit
def first_above(weights, index, target, SIZE: tl.constexpr):
    """Return the first index whose cumulative weight exceeds the target, and the weight before it.

    Where rounding leaves none, the last index of a positive weight.
    """
    cumulative = tl.cumsum(weights, 0)
    last = tl.max(tl.where(weights > 0, index, 0), 0)
    chosen = tl.min(tl.where(cumulative > target, index, SIZE), 0)
    chosen = tl.minimum(chosen, last)
    before = tl.sum(tl.where(index < chosen, weights, 0.0), 0)
    return chosen, before


@triton.jit
def draw_kernel(
    parts, logits, uniforms, tokens, stride, V, temperature, PIECES,
    BLOCK: tl.constexpr, PIECE: tl.constexpr, DIVIDE: tl.constexpr,
):  # fmt: skip
    """Write the first token at which the cumulative probability of a row exceeds its number."""
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, BLOCK)
    source = parts + (row * PIECES + pieces) * 3
    tops = tl.load(source, mask=pieces < PIECES, other=-1e38)
    sums = tl.load(source + 1, mask=pieces < PIECES, other=0.0)
    shares = sums.to(tl.float64) * tl.exp(tops - tl.max(tops, 0)).to(tl.float64)
    target = tl.load(uniforms + row) * tl.sum(shares, 0)
    piece, before = first_above(shares, pieces, target, BLOCK)
    share = tl.sum(tl.where(pieces == piece, shares, 0.0), 0)
    top = tl.sum(tl.where(pieces == piece, tops, 0.0), 0)
    # In [0, 1], of the piece's own mass; `before` is summed in another order, and may be above.
    within = tl.maximum((target - before) / share, 0.0)

    index = tl.arange(0, PIECE)
    columns = piece * PIECE + index
    value = tl.load(logits + row * stride + columns, mask=columns < V, other=-float("inf"))
    weights = tl.exp(scaled(value, temperature, DIVIDE) - top).to(tl.float64)
    token, _ = first_above(weights, index, within * tl.sum(weights, 0), PIECE)
    tl.store(tokens + row, (piece * PIECE + token).to(tl.int64))
