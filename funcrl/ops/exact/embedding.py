"""The embedding of tokens, and its gradient in a fixed order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core.custom_op import as_rows, differentiable, operator, per_device
from funcrl.core.numerics import at_least_float32, pairwise_sum
from funcrl.ops.arithmetic import embed as plain_embed


def _like(grad: Tensor, _tokens: Tensor, vocab_size: int, _blocks: int) -> Tensor:
    wide = at_least_float32(grad.dtype)
    return grad.new_empty(vocab_size, grad.shape[-1], dtype=wide)


@operator("embedding_gradient", _like, rows=(0, 1), summed=True)
def embedding_gradient_op(grad: Tensor, tokens: Tensor, vocab_size: int, blocks: int) -> Tensor:
    """Return the gradient [V, D], a token's rows added up in their order."""
    flat = tokens.reshape(-1)
    return embedding_gradient_impl(as_rows(grad), flat, vocab_size, blocks)


def _forward(
    tokens: Tensor, weight: Tensor, dtype: torch.dtype | None, _blocks: int
) -> tuple[Tensor]:
    return (plain_embed(tokens, weight, dtype),)


def _backward(
    _wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> list[Tensor]:
    tokens, weight, _dtype, blocks = inputs
    return [embedding_gradient_op(grads[0], tokens, len(weight), blocks).to(weight.dtype)]


_embed = differentiable("embed", _forward, _backward, rows=(0,))


def embed(
    tokens: Tensor, weight: Tensor, dtype: torch.dtype | None = None, blocks: int = 1
) -> Tensor:
    """Return the rows of the table, whose gradient sums each block of tokens for itself."""
    out: Tensor = _embed(tokens, weight, dtype, blocks)
    return out


@per_device
def embedding_gradient_impl(
    grad: Tensor, tokens: Tensor, vocab_size: int, blocks: int = 1
) -> Tensor:
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
