"""Products of rows with a weight: an element depends on its row alone (batch invariance).

The gradients of a weight and a bias are sums over all rows, block by block of rows.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from funcrl.core.custom_op import as_rows, differentiable, operator, per_device
from funcrl.core.numerics import at_least_float32, pairwise_sum
from funcrl.ops.contract import Weights
from funcrl.ops.exact.agreement import Product, multiply, multiply_into, places_agree, rows_agree

Shape: TypeAlias = Sequence[int]


def _like_weight(grad: Tensor, x: Tensor, _blocks: int) -> Tensor:
    return x.new_empty(grad.shape[-1], x.shape[-1], dtype=at_least_float32(x.dtype))


def _count_weight(grad: Shape, x: Shape, _blocks: int) -> int:
    return 2 * math.prod(grad) * x[-1]


@operator("weight_gradient", _like_weight, rows=(0, 1), summed=True, flops=_count_weight)
def weight_gradient_op(grad: Tensor, x: Tensor, blocks: int) -> Tensor:
    """Return `grad^T x` over all rows, in at least float32."""
    return weight_gradient_impl(as_rows(grad), as_rows(x), blocks)


def _like_bias(grad: Tensor, _blocks: int) -> Tensor:
    return grad.new_empty(grad.shape[-1], dtype=at_least_float32(grad.dtype))


@operator("bias_gradient", _like_bias, rows=(0,), summed=True)
def bias_gradient_op(grad: Tensor, blocks: int) -> Tensor:
    """Return the sum of all rows, in at least float32."""
    return bias_gradient_impl(as_rows(grad), blocks)


@per_device
def weight_gradient_impl(grad: Tensor, x: Tensor, blocks: int = 1) -> Tensor:
    """Return `grad^T x` [N, K] of grad [M, N] and x [M, K], in at least float32.

    The rows of each block are summed for themselves, and then the blocks in pairs.
    """
    wide = at_least_float32(x.dtype)
    grad, x = grad.to(wide).contiguous(), x.to(wide).contiguous()
    pairs = zip(grad.tensor_split(blocks), x.tensor_split(blocks), strict=True)
    return pairwise_sum([torch.mm(left.mT, right) for left, right in pairs])


@per_device
def add_weight_gradient_impl(total: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Return `total + grad^T x`, in the memory of the total."""
    return total.add_(weight_gradient_impl(grad, x))


@per_device
def bias_gradient_impl(grad: Tensor, blocks: int = 1) -> Tensor:
    """Return the sum [N] of the rows of grad [M, N], in at least float32."""
    wide = grad.to(at_least_float32(grad.dtype)).contiguous()
    return pairwise_sum([part.sum(dim=0) for part in wide.tensor_split(blocks)])


def linear_forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b`, without a derivative; weight and bias are cast to the dtype of x."""
    bias = None if bias is None else bias.to(x.dtype)
    return linear_impl(as_rows(x), weight.to(x.dtype), bias).view(*x.shape[:-1], len(weight))


def project_forward(x: Tensor, weights: Weights) -> Sequence[Tensor]:
    """Return several linear maps of one input, at once if a GPU has the weights side by side."""
    joined = _joined(weights)
    if joined is None:
        return [linear_forward(x, weight, bias) for weight, bias in weights]
    return linear_forward(x, *joined).split([len(weight) for weight, _ in weights], dim=-1)


def _joined(weights: Weights) -> tuple[Tensor, Tensor | None] | None:
    """Return the one matrix, and bias, that several lying one after another in memory make up."""
    matrix = side_by_side([weight for weight, _ in weights])
    biases = [bias for _, bias in weights if bias is not None]
    if not biases:
        return None if matrix is None else (matrix, None)
    bias = side_by_side(biases) if len(biases) == len(weights) else None
    return None if matrix is None or bias is None else (matrix, bias)


def side_by_side(parts: Sequence[Tensor]) -> Tensor | None:
    """Return the parts of a GPU's memory as one tensor if each begins where the last one ends."""
    first, end = parts[0], parts[0].storage_offset()
    for part in parts:
        alike = part.dtype == first.dtype and part.shape[1:] == first.shape[1:]
        if not (part.device.type == "cuda" and part.is_contiguous() and alike):
            return None
        same = part.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
        if not same or part.storage_offset() != end:
            return None
        end += part.numel()
    shape = (sum(len(part) for part in parts), *first.shape[1:])
    return first.as_strided(shape, first.stride())


def _like_linear(x: Tensor, weight: Tensor, _bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


def _count(x: Shape, weight: Shape, _bias: Shape | None) -> int:
    return 2 * math.prod(x) * weight[0]


@operator("linear", _like_linear, rows=(0,), flops=_count)
def linear_op(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `linear_forward` as an operator."""
    return linear_forward(x, weight, bias)


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, _blocks: int) -> tuple[Tensor]:
    return (linear_op(x, weight, bias),)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> list[Tensor]:
    (grad,), (x, weight, bias, blocks) = grads, inputs
    found = []
    if wanted[0]:
        found.append(linear_op(grad, weight.to(x.dtype).mT, None))
    if wanted[1]:
        found.append(weight_gradient_op(grad, x, blocks).to(weight.dtype))
    if wanted[2]:
        found.append(bias_gradient_op(grad, blocks).to(bias.dtype))
    return found


_linear = differentiable("linear", _forward, _backward, rows=(0,))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, blocks: int = 1) -> Tensor:
    """Return `x W^T + b`, whose gradients sum each of so many blocks of rows for itself."""
    out: Tensor = _linear(x, weight, bias, blocks)
    return out


def project(x: Tensor, weights: Weights, blocks: int = 1) -> Sequence[Tensor]:
    """Return several linear maps of one input."""
    return [linear(x, weight, bias, blocks) for weight, bias in weights]


def slow_products(device: str) -> list[str]:
    """Return the shapes of products, of those met so far, for which a GPU's library is not used.

    None of its calls that were tried had the bits of the kernel that defines the product.
    """
    if device != "cuda":
        return []
    from funcrl.ops.exact.cuda.linear import describe_products

    return [shape for shape, way in describe_products().items() if way == "definition"]


# The rows of the calls that define the result.
_TILE = 64
# Larger calls and smaller ones, used where their bits are those of the tile.
_LARGE = (4096, 512, 128)
_SMALL = 16
# The most numbers of a weight for calls of over 512 rows, and the most columns of any call.
_SMALL_WEIGHT = 2**17
_COLUMNS = 8192
# Sizes are padded to multiples of this where the order of a sum depends on a factor's address.
_ALIGNED = 16


@per_device
def linear_impl(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
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
