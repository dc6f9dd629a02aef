"""The short causal convolution of a gated delta layer, batch-invariant."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core.custom_op import as_rows, differentiable, operator, per_device
from funcrl.core.numerics import at_least_float32
from funcrl.ops.exact.linear import bias_gradient_impl
from funcrl.ops.sequence_args import complete_conv, conv_reads, last_tokens, tokens_since

Pair = tuple[Tensor, Tensor]


def _samples(x: Tensor) -> Tensor:
    return x[None] if x.ndim == 2 else x.flatten(0, -3)


def _convolved(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    flat = (_samples(x), weight, _samples(history), resets.reshape(-1, resets.shape[-1]))
    return short_conv_impl(*flat).view(x.shape)


def _like(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


@operator("short_conv", _like, rows=(0, 2, 3))
def short_conv_op(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    """Return the activated convolution."""
    return _convolved(x, weight, history, resets)


def _like_gradients(_grad: Tensor, x: Tensor, _weight: Tensor, history: Tensor, *_: Any) -> Any:
    wide = at_least_float32(x.dtype)
    return x.new_empty(x.shape), history.new_empty(history.shape), x.new_empty(x.shape, dtype=wide)


@operator("short_conv_gradients", _like_gradients, rows=(0, 1, 3, 4))
def short_conv_gradients_op(
    grad: Tensor, x: Tensor, weight: Tensor, history: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the history, and of the sums before the activation."""
    flat = (_samples(x), weight, _samples(history), resets.reshape(-1, resets.shape[-1]))
    found = short_conv_gradients_impl(_samples(grad), *flat)
    shapes = x.shape, history.shape, x.shape
    grad_x, grad_history, grad_total = (
        part.view(shape) for part, shape in zip(found, shapes, strict=True)
    )
    return grad_x, grad_history, grad_total


def _like_weight(_grad: Tensor, x: Tensor, taps: int, *_: Any) -> Tensor:
    return x.new_empty(x.shape[-1], taps, dtype=at_least_float32(x.dtype))


@operator("short_conv_weight_gradient", _like_weight, rows=(0, 1, 3, 4), summed=True)
def weight_gradient_op(
    grad_total: Tensor, x: Tensor, taps: int, history: Tensor, resets: Tensor, blocks: int
) -> Tensor:
    """Return the gradient of the weight over all tokens, each block of them summed for itself."""
    total = bias_gradient_impl
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


def short_conv_forward(
    x: Tensor, weight: Tensor, history: Tensor | None, resets: Tensor | None
) -> Pair:
    """Return `short_conv`, without a derivative."""
    history, resets = complete_conv(x, weight, history, resets)
    return _convolved(x, weight, history, resets), last_tokens(x, history, resets)


@per_device
def short_conv_impl(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    """Return silu of the convolution [B, T, E], rounded once, with silu(s) = s / (1 + exp(-s)).

    Args:
        x: [B, T, E].
        weight: [E, K].
        history: [B, K - 1, E].
        resets: [B, T] bool.
    """
    total = _sum_taps(x, weight, history, resets)
    return (total / total.neg().exp_().add_(1)).to(x.dtype)


@per_device
def short_conv_gradients_impl(
    grad: Tensor, x: Tensor, weight: Tensor, history: Tensor, resets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, of the history, and of the sums before the activation."""
    total = _sum_taps(x, weight, history, resets)
    sigmoid = total.neg().exp_().add_(1).reciprocal_()
    grad_total = (1 - sigmoid).mul_(total).add_(1).mul_(sigmoid).mul_(grad)
    since, taps, length = tokens_since(resets)[..., None], weight.shape[-1], x.shape[-2]
    stream = grad_total.new_zeros(len(x), taps - 1 + length, x.shape[-1])
    for tap, column in enumerate(_columns(x, weight)):
        given = grad_total.masked_fill(since < taps - 1 - tap, 0.0).mul_(column)
        stream[:, tap : tap + length].add_(given)
    # Results of an operator have memory of their own.
    grad_history, grad_x = (
        part.to(x.dtype, memory_format=torch.contiguous_format, copy=True)
        for part in stream.split([taps - 1, length], dim=1)
    )
    return grad_x, grad_history, grad_total


def _sum_taps(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    """Return the convolution [B, T, E] in at least float32."""
    reads = conv_reads(x, weight.shape[-1], history, resets)
    pairs = zip(reads, _columns(x, weight), strict=True)
    total, *others = (read.mul_(column) for read, column in pairs)
    for product in others:
        total.add_(product)
    return total


def _columns(x: Tensor, weight: Tensor) -> Sequence[Tensor]:
    """Return the weights [E] of each tap, rounded to the dtype of x, in at least float32."""
    return weight.to(x.dtype).to(at_least_float32(x.dtype)).contiguous().unbind(-1)
