"""Kernels over a row of logits: normaliser, entropy, log-probability, and their gradients.

A row is summed in pieces of a fixed size, each by one program, and then over the pieces in order.
"""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


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
