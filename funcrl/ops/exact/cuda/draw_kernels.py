"""The kernel that draws a token from a row of logits by one number, from the sums of its pieces."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl

from funcrl.ops.exact.cuda.score_kernels import scaled


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
