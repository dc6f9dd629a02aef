"""The kernel of a product in tf32, whatever the process has chosen for torch's products."""
# Triton has no types, and its kernels take pointers.
# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

import triton
import triton.language as tl


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
