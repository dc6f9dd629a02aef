"""The short causal convolution of a gated delta layer, whose tokens stand alone."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import as_rows, differentiable, operator
from funcrl.ops.streams import complete_conv, conv_reads, last_tokens

Pair = tuple[Tensor, Tensor]


def _samples(x: Tensor) -> Tensor:
    return x[None] if x.ndim == 2 else x.flatten(0, -3)


def _convolved(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    flat = (_samples(x), weight, _samples(history), resets.reshape(-1, resets.shape[-1]))
    out: Tensor = kernels_of(x).short_conv(*flat)
    return out.view(x.shape)


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator("short_conv", _like, rows=(0, 2, 3))
def short_conv_op(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    """Return the activated convolution."""
    return _convolved(x, weight, history, resets)


def _like_gradients(_grad: Tensor, x: Tensor, _weight: Tensor, history: Tensor, *_: Any) -> Any:
    wide = numerics.at_least_float32(x.dtype)
    return x.new_empty(x.shape), history.new_empty(history.shape), x.new_empty(x.shape, dtype=wide)


@operator("short_conv_gradients", _like_gradients, rows=(0, 1, 3, 4))
def short_conv_gradients_op(
    grad: Tensor, x: Tensor, weight: Tensor, history: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the history, and of the sums before the activation."""
    flat = (_samples(x), weight, _samples(history), resets.reshape(-1, resets.shape[-1]))
    found = kernels_of(x).short_conv_gradients(_samples(grad), *flat)
    shapes = x.shape, history.shape, x.shape
    grad_x, grad_history, grad_total = (
        part.view(shape) for part, shape in zip(found, shapes, strict=True)
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
    reads = conv_reads(x, taps, history, resets)
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
    return _convolved(x, weight, history, resets), last_tokens(x, history, resets)
