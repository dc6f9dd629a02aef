"""The short causal convolution of a gated delta layer, whose tokens stand alone.

Torch's elementwise operations, of which each rounds once, in the order of the taps: on a CPU and on
a GPU alike.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import as_rows, differentiable, operator
from funcrl.ops.streams import complete_conv, last_tokens, tokens_since

Pair = tuple[Tensor, Tensor]


def _reads(x: Tensor, taps: int, history: Tensor, resets: Tensor) -> list[Tensor]:
    """Return what each tap reads of each token [..., T, E], in at least float32."""
    wide = torch.cat((history, x), dim=-2).to(numerics.at_least_float32(x.dtype))
    since, length = tokens_since(resets)[..., None], x.shape[-2]
    return [
        wide[..., tap : tap + length, :].masked_fill(since < taps - 1 - tap, 0.0)
        for tap in range(taps)
    ]


def _columns(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    """Return the weights [E] of each tap, rounded to the dtype of x, in at least float32."""
    return weight.to(x.dtype).to(numerics.at_least_float32(x.dtype)).contiguous().unbind(-1)


def _sum_taps(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    """Return the convolution [..., T, E] in at least float32."""
    reads = _reads(x, weight.shape[-1], history, resets)
    total, *others = (
        read.mul_(column) for read, column in zip(reads, _columns(x, weight), strict=True)
    )
    for product in others:
        total.add_(product)
    return total


def _sigmoid(x: Tensor) -> Tensor:
    return x.neg().exp_().add_(1).reciprocal_()


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator("short_conv", _like, rows=(0, 2, 3))
def short_conv_op(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    """Return the activated convolution."""
    total = _sum_taps(x, weight, history, resets)
    return (total / total.neg().exp_().add_(1)).to(x.dtype)


def _like_gradients(_grad: Tensor, x: Tensor, _weight: Tensor, history: Tensor, *_: Any) -> Any:
    wide = numerics.at_least_float32(x.dtype)
    return x.new_empty(x.shape), history.new_empty(history.shape), x.new_empty(x.shape, dtype=wide)


@operator("short_conv_gradients", _like_gradients, rows=(0, 1, 3, 4))
def short_conv_gradients_op(
    grad: Tensor, x: Tensor, weight: Tensor, history: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the history, and of the sums before the activation."""
    total = _sum_taps(x, weight, history, resets)
    sigmoid = _sigmoid(total)
    slope = (1 - sigmoid).mul_(total).add_(1).mul_(sigmoid)
    grad_total = slope.mul_(grad)
    since, taps = tokens_since(resets)[..., None], weight.shape[-1]
    stream = grad_total.new_zeros(*x.shape[:-2], taps - 1 + x.shape[-2], x.shape[-1])
    for tap, column in enumerate(_columns(x, weight)):
        given = grad_total.masked_fill(since < taps - 1 - tap, 0.0).mul_(column)
        stream[..., tap : tap + x.shape[-2], :].add_(given)
    # Results of an operator have memory of their own.
    grad_history, grad_x = (
        part.to(x.dtype, memory_format=torch.contiguous_format, copy=True)
        for part in stream.split([taps - 1, x.shape[-2]], dim=-2)
    )
    return grad_x, grad_history, grad_total


def _like_weight(_grad: Tensor, x: Tensor, taps: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[-1], taps, dtype=numerics.at_least_float32(x.dtype))


@operator("short_conv_weight_gradient", _like_weight, rows=(0, 1, 3, 4), summed=True)
def weight_gradient_op(
    grad_total: Tensor, x: Tensor, taps: int, history: Tensor, resets: Tensor, blocks: int
) -> Tensor:
    """Return the gradient of the weight over all tokens, each block of them summed for itself."""
    total = kernels_of(x).bias_gradient
    reads = _reads(x, taps, history, resets)
    columns = [total(as_rows(read.mul_(grad_total)), blocks) for read in reads]
    return torch.stack(columns, dim=-1)


def _forward(
    x: Tensor, weight: Tensor, history: Tensor, resets: Tensor, _blocks: int
) -> tuple[Tensor]:
    return (short_conv_op(x, weight, history, resets),)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> list[Tensor]:
    x, weight, history, resets, blocks = inputs
    grad_x, grad_history, grad_total = short_conv_gradients_op(*grads, x, weight, history, resets)
    found = [grad_x]
    if wanted[1]:
        taps = weight.shape[-1]
        summed = weight_gradient_op(grad_total, x, taps, history, resets, blocks)
        found.append(summed.to(weight.dtype))
    if wanted[2]:
        found.append(grad_history)
    return found if wanted[0] else found[1:]


_short_conv = differentiable("short_conv", _forward, _backward, rows=(0, 2, 3))


def short_conv(
    x: Tensor, weight: Tensor, history: Tensor | None, resets: Tensor | None, blocks: int = 1
) -> Pair:
    """Return what `funcrl.ops.short_conv` returns.

    The weight's gradient sums each of so many blocks of tokens for itself.
    """
    history, resets = complete_conv(x, weight, history, resets)
    out: Tensor = _short_conv(x, weight, history, resets, blocks)
    return out, last_tokens(x, history, resets)


def plain_short_conv(
    x: Tensor, weight: Tensor, history: Tensor | None, resets: Tensor | None
) -> Pair:
    """Return `short_conv`, without a derivative."""
    history, resets = complete_conv(x, weight, history, resets)
    out: Tensor = short_conv_op(x, weight, history, resets)
    return out, last_tokens(x, history, resets)
