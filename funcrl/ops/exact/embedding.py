"""The embedding of tokens, and its gradient in a fixed order."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.arithmetic import embed as plain_embed
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import differentiable, operator


def _like(grad: Tensor, _tokens: Tensor, vocab_size: int) -> Tensor:
    wide = numerics.at_least_float32(grad.dtype)
    return grad.new_empty(vocab_size, grad.shape[-1], dtype=wide)


@operator("embedding_gradient", _like, rows=(0, 1), summed=True)
def embedding_gradient_op(grad: Tensor, tokens: Tensor, vocab_size: int) -> Tensor:
    """Return the gradient [V, D], a token's rows added up in their order."""
    flat = grad.reshape(-1, grad.shape[-1]), tokens.reshape(-1)
    out: Tensor = kernels_of(grad).embedding_gradient(*flat, vocab_size)
    return out


def _forward(tokens: Tensor, weight: Tensor, dtype: torch.dtype | None) -> tuple[Tensor]:
    return (plain_embed(tokens, weight, dtype),)


def _backward(
    _wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], _: Sequence[Tensor]
) -> list[Tensor]:
    tokens, weight, _dtype = inputs
    return [embedding_gradient_op(grads[0], tokens, len(weight)).to(weight.dtype)]


embed = differentiable("embed", _forward, _backward, rows=(0,))
