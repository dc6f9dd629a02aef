"""Log-probabilities and entropies of tokens: one function for trainer, sampler and vLLM."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.linear import plain_linear
from funcrl.ops.exact.recipe import differentiable, operator

Triple = tuple[Tensor, Tensor, Tensor]
Pair = tuple[Tensor, Tensor]


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities over the last axis [..., V], in at least float32.

    Its numbers are those of `linear_scores`, to the last bit; it has no derivative.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    out: Tensor = kernels_of(logits).log_softmax(rows, temperature)
    return out.view(logits.shape)


def _like(hidden: Tensor, *_: Any) -> Triple:
    out = hidden.new_empty(hidden.shape[:-1], dtype=numerics.at_least_float32(hidden.dtype))
    return out, torch.empty_like(out), torch.empty_like(out)


def _count(hidden: Sequence[int], weight: Sequence[int], *_: Any) -> int:
    return 2 * math.prod(hidden) * weight[0]


@operator("linear_scores", _like, rows=(0, 2), flops=_count)
def linear_scores_op(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
) -> Triple:
    """Return log-probabilities, entropies and log-normalisers of rows of `hidden W^T`."""
    rows, flat, kernels = (
        hidden.reshape(-1, hidden.shape[-1]),
        targets.reshape(-1),
        kernels_of(hidden),
    )
    cast = weight.to(hidden.dtype)
    parts = [
        kernels.scores(plain_linear(rows[part], cast, None), flat[part], temperature)
        for part in _chunks(len(rows), chunk)
    ]
    found = [torch.cat(columns).view(targets.shape) for columns in zip(*parts, strict=True)]
    return found[0], found[1], found[2]


def _like_gradients(hidden: Tensor, weight: Tensor, *rest: Any) -> Pair:
    wide, trained = numerics.at_least_float32(hidden.dtype), rest[-1]
    grad_hidden = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return grad_hidden, weight.new_empty(weight.shape if trained else (0,), dtype=wide)


def _count_gradients(hidden: Sequence[int], weight: Sequence[int], *_: Any) -> int:
    """Return the operations of the logits and of both gradients."""
    return 3 * _count(hidden, weight)


@operator(
    "linear_scores_gradients", _like_gradients, rows=(0, 2, 3, 4, 5, 6), summed=True,
    flops=_count_gradients,
)  # fmt: skip
def gradients_op(
    hidden: Tensor, weight: Tensor, targets: Tensor, entropy: Tensor, normaliser: Tensor,
    grad_logprob: Tensor, grad_entropy: Tensor, temperature: float, chunk: int, trained: bool,
) -> Pair:  # fmt: skip
    """Return the gradients of the rows and of the weight, whose logits are computed anew."""
    kernels = kernels_of(hidden)
    rows, cast = hidden.reshape(-1, hidden.shape[-1]), weight.to(hidden.dtype)
    columns = [
        each.reshape(-1) for each in (targets, entropy, normaliser, grad_logprob, grad_entropy)
    ]
    grad_hidden = torch.empty_like(rows)
    grad_weight: Tensor | None = None
    for part in _chunks(len(rows), chunk):
        logits = plain_linear(rows[part], cast, None)
        grad = kernels.scores_gradients(logits, *(each[part] for each in columns), temperature)
        del logits
        grad_hidden[part] = plain_linear(grad, cast.mT, None)
        if trained:
            own = kernels.weight_gradient(grad, rows[part])
            grad_weight = own if grad_weight is None else grad_weight.add_(own)
    if grad_weight is None:
        grad_weight = weight.new_empty(0, dtype=numerics.at_least_float32(hidden.dtype))
    return grad_hidden.view(hidden.shape), grad_weight


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int
) -> Triple:
    return linear_scores_op(hidden, weight, targets, temperature, chunk)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    (hidden, weight, targets, temperature, chunk), (_, *kept) = inputs, results
    given = hidden, weight, targets, *kept, *grads, temperature, chunk
    grad_hidden, grad_weight = gradients_op(*given, bool(wanted[1]))
    found = [grad_hidden, grad_weight.to(weight.dtype)]
    return [each for each, want in zip(found, wanted, strict=False) if want]


linear_scores = differentiable("linear_scores", _forward, _backward, rows=(0, 2), returned=2)


def _chunks(length: int, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, max(length, 1), chunk))
