"""Products with weights, in calls whose bits agree."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from funcrl.core.numerics import at_least_float32
from funcrl.core.pairwise import pairwise_sum
from funcrl.ops.exact.cpu.agreement import (
    Product,
    multiply,
    multiply_into,
    places_agree,
    rows_agree,
)

# The rows of the calls that define the result.
_TILE = 64
# Larger calls and smaller ones, used where their bits are those of the tile.
_LARGE = (4096, 512, 128)
_SMALL = 16
# The most numbers of a weight for calls of over 512 rows, and the most columns of any call.
_SMALL_WEIGHT = 2**17
_COLUMNS = 8192
# Factors whose place in memory decides about the order of a sum are filled up to multiples of this.
_ALIGNED = 16


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b` [M, N] of rows x [M, K] and weight [N, K]."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    x = x.contiguous()
    if weight.stride(1) != 1 and weight.stride(0) != 1:
        weight = weight.contiguous()
    for start in range(0, weight.shape[0], _COLUMNS):
        part = slice(start, start + _COLUMNS)
        _multiply(out[:, part], x, weight[part])
    return out if bias is None else out.add_(bias)


def _multiply(out: Tensor, x: Tensor, weight: Tensor) -> None:
    """Write `x W^T` into `out`."""
    if places_agree(_TILE, _product(x, weight)):
        return _fill(out, x, weight)
    columns, depth = (-size % _ALIGNED for size in weight.shape)
    x, weight = nn.functional.pad(x, (0, depth)), nn.functional.pad(weight, (0, depth, 0, columns))
    whole = x.new_empty(x.shape[0], weight.shape[0])
    _fill(whole, x, weight.contiguous())
    out.copy_(whole[:, : out.shape[1]])
    return None


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
    product = _product(x, weight)
    for rows in _LARGE:
        if rows > 512 and weight.numel() > _SMALL_WEIGHT:
            continue
        if 4 * num_rows > 3 * rows and rows_agree("rows", rows, _TILE, product):
            while 4 * num_rows > 3 * rows:
                yield "rows", rows
                num_rows -= rows
    while num_rows > 0:
        few = num_rows <= _TILE // 2 and rows_agree("columns", _SMALL, _TILE, product)
        call, rows = ("columns", _SMALL) if few else ("rows", _TILE)
        yield call, rows
        num_rows -= rows


def _product(x: Tensor, weight: Tensor) -> Product:
    shape = (weight.shape[0], weight.shape[1])
    return Product(shape, weight.stride(1) != 1, x.dtype, torch.get_num_threads())


def weight_gradient(grad: Tensor, x: Tensor, blocks: int = 1) -> Tensor:
    """Return `grad^T x` [N, K] of grad [M, N] and x [M, K], in at least float32.

    The rows of each block are summed for themselves, and then the blocks in pairs.
    """
    wide = at_least_float32(x.dtype)
    grad, x = grad.to(wide).contiguous(), x.to(wide).contiguous()
    pairs = zip(grad.tensor_split(blocks), x.tensor_split(blocks), strict=True)
    return pairwise_sum([torch.mm(left.mT, right) for left, right in pairs])


def add_weight_gradient(total: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Return `total + grad^T x`, in the memory of the total."""
    return total.add_(weight_gradient(grad, x))


def bias_gradient(grad: Tensor, blocks: int = 1) -> Tensor:
    """Return the sum [N] of the rows of grad [M, N], in at least float32."""
    wide = grad.to(at_least_float32(grad.dtype)).contiguous()
    return pairwise_sum([part.sum(dim=0) for part in wide.tensor_split(blocks)])


def embedding_gradient(grad: Tensor, tokens: Tensor, vocab_size: int, blocks: int = 1) -> Tensor:
    """Return [V, D]: for each token the sum of its rows of grad [M, D], in at least float32."""
    wide = grad.to(at_least_float32(grad.dtype))
    # The blocks' sums are of the tokens that occur, which are few beside a vocabulary.
    used, places = tokens.unique(return_inverse=True)
    # On a CPU rows are added one after the other, in order.
    sums = [
        wide.new_zeros(len(used), grad.shape[1]).index_add_(0, at, part)
        for at, part in zip(places.tensor_split(blocks), wide.tensor_split(blocks), strict=True)
    ]
    return wide.new_zeros(vocab_size, grad.shape[1]).index_copy_(0, used, pairwise_sum(sums))
