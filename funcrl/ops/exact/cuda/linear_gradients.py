"""Gradients of weights: sums over all rows, by cuBLAS, block by block of rows.

A block is summed as it is alone, so that the same rows have the same sum in fewer and in more
micro-batches; blocks are then added in pairs.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.cuda import is_current_stream_capturing

from funcrl.core.numerics import pairwise_sum
from funcrl.ops.exact.cuda.layout import fresh
from funcrl.ops.exact.cuda.linear import contiguous_aligned


class Shape(NamedTuple):
    """What the library's choice of a product depends on."""

    rows: int
    columns: int
    inner: int
    dtype: torch.dtype
    device: torch.device


_NUMBERS = 1 << 21  # results that are compared: an order of additions may show in one of 10^5
_LARGE = 1 << 16  # results of a product from which on its sum with a total is worth a comparison
# Whether the library adds to a total as a sum of two tensors does: a function of GPU and library.
_ADDS: dict[Shape, bool] = {}


def weight_gradient_impl(grad: Tensor, x: Tensor, blocks: int = 1) -> Tensor:
    """Return grad^T x [N, K] in float32, accumulated in it; equal shapes give equal bits."""
    parts = list(zip(grad.tensor_split(blocks), x.tensor_split(blocks), strict=True))
    totals = [_product(*part) for part in parts[::2]]
    for total, part in zip(totals, parts[1::2], strict=False):
        add_weight_gradient_impl(total, *part)
    return pairwise_sum(totals)


def add_weight_gradient_impl(total: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Return total + grad^T x, in the memory of the total [N, K] of float32."""
    if not grad.numel() or not x.numel():
        return total
    grad, x = contiguous_aligned(grad), contiguous_aligned(x)
    shape = Shape(len(x), grad.shape[1], x.shape[1], x.dtype, x.device)
    if total.numel() >= _LARGE and _adds_as_one(shape):
        return _added(total, grad, x)
    return total.add_(_product(grad, x))


def bias_gradient_impl(grad: Tensor, blocks: int = 1) -> Tensor:
    """Return the sum [N] over the rows in float32, by torch's reduction, whose order is fixed."""
    parts = grad.contiguous().tensor_split(blocks)
    return pairwise_sum([contiguous_aligned(part).sum(0, dtype=torch.float32) for part in parts])


def _product(grad: Tensor, x: Tensor) -> Tensor:
    if not grad.numel() or not x.numel():
        return fresh(x, grad.shape[1], x.shape[1], dtype=torch.float32).zero_()
    grad, x = contiguous_aligned(grad), contiguous_aligned(x)
    if x.dtype == torch.float32:
        return torch.mm(grad.t(), x)
    return torch.mm(grad.t(), x, out_dtype=torch.float32)


def _added(total: Tensor, grad: Tensor, x: Tensor) -> Tensor:
    """Return the sum that the library makes while it writes the product."""
    if x.dtype == torch.float32:
        return total.addmm_(grad.t(), x)
    return torch.addmm(total, grad.t(), x, out_dtype=torch.float32, out=total)


def _adds_as_one(shape: Shape) -> bool:
    """Return whether `_added` is known to have the bits of a product that is then added."""
    if shape not in _ADDS and not (shape.device.type == "cuda" and is_current_stream_capturing()):
        _ADDS[shape] = _compared(shape)
    return _ADDS.get(shape, False)


def _compared(shape: Shape) -> bool:
    """Return whether the two have equal bits, of at least `_NUMBERS` random numbers."""
    # A caller's random numbers stay as they are.
    generator = torch.Generator(device=shape.device).manual_seed(0)

    def randn(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(sizes, generator=generator, dtype=dtype, device=shape.device)

    for _ in range(-(-_NUMBERS // (shape.columns * shape.inner))):
        grad, x = (randn(shape.rows, width, dtype=shape.dtype) for width in shape[1:3])
        total = randn(shape.columns, shape.inner)
        expected = total + _product(grad, x)
        if not torch.equal(_added(total, grad, x), expected):
            return False
    return True
