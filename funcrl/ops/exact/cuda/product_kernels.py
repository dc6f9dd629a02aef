"""The product that defines `linear`: one float32 accumulator a number, K in order, no split."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, fresh


class Tile(NamedTuple):
    """Rows, columns and inner numbers that a program multiplies at a time, and its resources."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int


# The definition. Float32 is multiplied without tensor cores, and has no other tile.
DEFINITION = Tile(64, 128, 64, 4, 3)
FLOAT32 = Tile(64, 64, 32, 4, 3)
# Tiles for few rows: for up to so many rows, those for up to so many columns.
FEW_ROWS = {
    16: {2048: Tile(16, 16, 256, 4, 4), 1 << 31: Tile(16, 32, 128, 4, 5)},
    32: {2048: Tile(32, 16, 256, 4, 3), 1 << 31: Tile(32, 32, 128, 4, 4)},
    64: {
        2048: Tile(64, 16, 128, 4, 4),
        4096: Tile(64, 32, 128, 4, 4),
        1 << 31: Tile(64, 64, 64, 4, 5),
    },
}


def few_rows_tile(rows: int, columns: int) -> Tile:
    """Return the tile for a number of rows that is a key of `FEW_ROWS`."""
    return next(tile for most, tile in FEW_ROWS[rows].items() if columns <= most)


def tiled(x: Tensor, weight: Tensor, bias: Tensor | None, tile: Tile) -> Tensor:
    """Return x W^T + bias [M, N] by tiles of one size; the bias is added before rounding."""
    (size, inner), columns = x.shape, weight.shape[0]
    out = fresh(x, size, columns)
    if not out.numel():
        return out
    programs = -(-size // tile.rows) * -(-columns // tile.columns)
    _kernel[(programs,)](
        x, weight, x if bias is None else bias, out, size, columns, inner, *x.stride(),
        *weight.stride(), BM=tile.rows, BN=tile.columns, BK=tile.inner,
        EVEN_N=columns % tile.columns == 0, EVEN_K=inner % tile.inner == 0, BIAS=bias is not None,
        IEEE=x.dtype == torch.float32, num_warps=tile.warps, num_stages=tile.stages, **STRICT,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def _kernel(
    x, weight, bias, out, M, N, K, x_m, x_k, w_n, w_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, BIAS: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    # Programs that run together share columns of the weight, for up to 8 tiles of rows.
    row_tiles, column_tiles = tl.cdiv(M, BM), tl.cdiv(N, BN)
    program = tl.program_id(0)
    group = program // (8 * column_tiles)
    rows_of_group = tl.minimum(row_tiles - group * 8, 8)
    within = program % (8 * column_tiles)
    rows = (group * 8 + within % rows_of_group) * BM + tl.arange(0, BM)
    columns = (within // rows_of_group) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    x_at = x + rows[:, None].to(tl.int64) * x_m + inner[None, :] * x_k
    w_at = weight + columns[None, :].to(tl.int64) * w_n + inner[:, None] * w_k
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        x_seen = (rows < M)[:, None]
        if not EVEN_K:
            x_seen = x_seen & (k + inner < K)[None, :]
        left = tl.load(x_at, mask=x_seen, other=0.0)
        if EVEN_N and EVEN_K:
            right = tl.load(w_at)
        else:
            w_seen = (columns < N)[None, :] & (k + inner < K)[:, None]
            right = tl.load(w_at, mask=w_seen, other=0.0)
        total = tl.dot(left, right, total, input_precision="ieee" if IEEE else "tf32")
        x_at += BK * x_k
        w_at += BK * w_k
    if BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    seen = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None].to(tl.int64) * N + columns[None, :], total, mask=seen)
