"""Products with weights, in calls whose bits agree."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from funcrl.ops.exact.cpu.agreement import multiply, multiply_into, rows_agree
from funcrl.ops.exact.cpu.sums import wide_dtype

# The rows of the calls that define the result.
_TILE = 64
# Larger calls and smaller ones, used where their bits are those of the tile.
_LARGE = (4096, 512, 128)
_SMALL = 16
# The most numbers of a weight for calls of over 512 rows, and the most columns of any call.
_SMALL_WEIGHT = 2**17
_COLUMNS = 8192


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` [M, N] of rows x [M, K] and weight [N, K]."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    x = x.contiguous()
    if weight.stride(1) != 1 and weight.stride(0) != 1:
        weight = weight.contiguous()
    for start in range(0, weight.shape[0], _COLUMNS):
        part = slice(start, start + _COLUMNS)
        _fill(out[:, part], x, weight[part])
    return out if bias is None else out.add_(bias)


def _fill(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Write `x W^T` into `out`."""
    start, num_rows = 0, x.shape[0]
    for call, rows in _calls(num_rows, x, weight):
        stop = start + rows
        if stop <= num_rows:
            multiply_into(out[start:stop], call, x[start:stop], weight)
        else:
            padded = nn.functional.pad(x[start:], (0, 0, 0, stop - num_rows))
            out[start:] = multiply(call, padded, weight)[: num_rows - start]
        start = stop


def _calls(num_rows: int, x: Tensor, weight: Tensor) -> Iterator[tuple[str, int]]:
    """Return the form and the rows of each call; the last one may have more rows than are left."""
    shape, transposed = (weight.shape[0], weight.shape[1]), weight.stride(1) != 1
    key = (shape, transposed, x.dtype, torch.get_num_threads())
    for rows in _LARGE:
        if rows > 512 and weight.numel() > _SMALL_WEIGHT:
            continue
        if 4 * num_rows > 3 * rows and rows_agree("rows", rows, _TILE, *key):
            while 4 * num_rows > 3 * rows:
                yield "rows", rows
                num_rows -= rows
    while num_rows > 0:
        few = num_rows <= _TILE // 2 and rows_agree("columns", _SMALL, _TILE, *key)
        call, rows = ("columns", _SMALL) if few else ("rows", _TILE)
        yield call, rows
        num_rows -= rows


def weight_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return `grad^T x` [N, K] of grad [M, N] and x [M, K], in at least float32."""
    wide = wide_dtype(x)
    return torch.mm(grad.to(wide).contiguous().mT, x.to(wide).contiguous())


def bias_gradient(grad: Tensor) -> Tensor:
    """Return the sum [N] of the rows of grad [M, N], in at least float32."""
    return grad.to(wide_dtype(grad)).contiguous().sum(dim=0)


def embedding_gradient(grad: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return [V, D]: for each token the sum of its rows of grad [M, D], in at least float32."""
    wide = grad.to(wide_dtype(grad))
    # On a CPU rows are added one after the other, in order.
    return wide.new_zeros(vocab_size, grad.shape[1]).index_add_(0, tokens, wide)
