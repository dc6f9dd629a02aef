"""The embedding of tokens, and its gradient in a fixed order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.arithmetic import embed as plain_embed
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import as_rows, differentiable, operator


def _like(grad: Tensor, _tokens: Tensor, vocab_size: int, _blocks: int) -> Tensor:
    wide = numerics.at_least_float32(grad.dtype)
    return grad.new_empty(vocab_size, grad.shape[-1], dtype=wide)


@operator("embedding_gradient", _like, rows=(0, 1), summed=True)
def embedding_gradient_op(grad: Tensor, tokens: Tensor, vocab_size: int, blocks: int) -> Tensor:
    """Return the gradient [V, D], a token's rows added up in their order."""
    kernels, flat = kernels_of(grad), tokens.reshape(-1)
    out: Tensor = kernels.embedding_gradient(as_rows(grad), flat, vocab_size, blocks)
    return out


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
