"""The short causal convolution: elementwise operations, of which each rounds once, tap by tap."""

from collections.abc import Sequence

import torch
from torch import Tensor

from funcrl.core.numerics import at_least_float32
from funcrl.ops.streams import conv_reads, tokens_since


def short_conv(x: Tensor, weight: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    """Return silu of the convolution [B, T, E], rounded once, with silu(s) = s / (1 + exp(-s)).

    Args:
        x: [B, T, E].
        weight: [E, K].
        history: [B, K - 1, E].
        resets: [B, T] bool.
    """
    total = _sum_taps(x, weight, history, resets)
    return (total / total.neg().exp_().add_(1)).to(x.dtype)


def short_conv_gradients(
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
