"""Gradients of a weight and a bias: sums over all rows, block by block of rows."""

import math
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from funcrl.core.custom_op import as_rows, operator
from funcrl.core.numerics import at_least_float32, pairwise_sum
from funcrl.ops.exact.device import per_device

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
