"""Products with a weight, by rows that stand alone."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.contract import Weights
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import as_rows, differentiable, operator

Shape: TypeAlias = Sequence[int]


def plain_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return `x W^T + b`, without a derivative; weight and bias are cast to the dtype of x."""
    bias = None if bias is None else bias.to(x.dtype)
    out: Tensor = kernels_of(x).linear(as_rows(x), weight.to(x.dtype), bias)
    return out.view(*x.shape[:-1], len(weight))


def plain_project(x: Tensor, weights: Weights) -> Sequence[Tensor]:
    """Return several `plain_linear` of one input, at once if a GPU has the weights side by side."""
    joined = _joined(weights)
    if joined is None:
        return [plain_linear(x, weight, bias) for weight, bias in weights]
    return plain_linear(x, *joined).split([len(weight) for weight, _ in weights], dim=-1)


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
    """Return `plain_linear` as an operator."""
    return plain_linear(x, weight, bias)


def _like_weight(grad: Tensor, x: Tensor, _blocks: int) -> Tensor:
    return x.new_empty(grad.shape[-1], x.shape[-1], dtype=numerics.at_least_float32(x.dtype))


def _count_weight(grad: Shape, x: Shape, _blocks: int) -> int:
    return 2 * math.prod(grad) * x[-1]


@operator("weight_gradient", _like_weight, rows=(0, 1), summed=True, flops=_count_weight)
def weight_gradient_op(grad: Tensor, x: Tensor, blocks: int) -> Tensor:
    """Return `grad^T x` over all rows, in at least float32."""
    out: Tensor = kernels_of(x).weight_gradient(as_rows(grad), as_rows(x), blocks)
    return out


def _like_bias(grad: Tensor, _blocks: int) -> Tensor:
    return grad.new_empty(grad.shape[-1], dtype=numerics.at_least_float32(grad.dtype))


@operator("bias_gradient", _like_bias, rows=(0,), summed=True)
def bias_gradient_op(grad: Tensor, blocks: int) -> Tensor:
    """Return the sum of all rows, in at least float32."""
    out: Tensor = kernels_of(grad).bias_gradient(as_rows(grad), blocks)
    return out


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
