"""A product in tf32, whatever precision the process has chosen for torch's products."""

import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import fresh
from funcrl.ops.recurrent.cuda.plans import Tile

_TILE = Tile(128, 128, 32, 8, 3)


def linear(rows: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor:
    """Return rows W^T + bias [M, G], of rows [M, D] and a weight [G, D]."""
    out, weight = fresh(rows, len(rows), len(weight)), weight.contiguous()
    linear_kernel[_TILE.grid(*out.shape)](
        rows, weight, weight if bias is None else bias, out, len(rows), rows.stride(0),
        *weight.shape, *_TILE.size, bias is not None, **_TILE.resources,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["M"])
def linear_kernel(
    x, weight, bias, out, M, x_row, N: tl.constexpr, K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Write x W^T + bias [M, N]; `weight` is [N, K]."""
    rows = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    columns = tl.program_id(1) * BN + tl.arange(0, BN)
    inner = tl.arange(0, BK)
    x_at = x + rows[:, None] * x_row + inner[None, :]
    w_at = weight + columns[None, :] * K + inner[:, None]
    total = tl.zeros((BM, BN), tl.float32)
    for k in range(0, K, BK):
        left_seen, right_seen = (rows < M)[:, None], (columns < N)[None, :]
        if K % BK != 0:
            left_seen = left_seen & (k + inner < K)[None, :]
            right_seen = right_seen & (k + inner < K)[:, None]
        left = tl.load(x_at, mask=left_seen, other=0.0)
        right = tl.load(w_at, mask=right_seen, other=0.0)
        total = tl.dot(left, right, total, input_precision="tf32")
        x_at += BK
        w_at += BK
    if BIAS:
        total += tl.load(bias + columns, mask=columns < N, other=0.0).to(tl.float32)[None, :]
    seen = (rows < M)[:, None] & (columns < N)[None, :]
    tl.store(out + rows[:, None] * N + columns[None, :], total, mask=seen)
