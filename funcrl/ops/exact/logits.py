"""Scores of tokens from rows of logits, and the gradient of the logits, by one kernel a pass."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import as_rows, differentiable, operator

Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _like(logits: Tensor, *_: Any) -> Triple:
    out = logits.new_empty(logits.shape[:-1], dtype=numerics.at_least_float32(logits.dtype))
    return out, torch.empty_like(out), torch.empty_like(out)


@operator("score_logits", _like, rows=(0, 1))
def score_logits_op(logits: Tensor, targets: Tensor, temperature: float) -> Triple:
    """Return log-probabilities of targets, entropies and log-normalisers of logits [..., V]."""
    found = kernels_of(logits).scores(as_rows(logits), targets.reshape(-1), temperature)
    logprob, entropy, normaliser = (part.view(targets.shape) for part in found)
    return logprob, entropy, normaliser


def _like_gradient(logits: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


@operator("logits_gradient", _like_gradient, rows=(0, 1, 2, 3, 4, 5))
def logits_gradient_op(
    logits: Tensor, targets: Tensor, entropy: Tensor, normaliser: Tensor,
    grad_logprob: Tensor, grad_entropy: Tensor, temperature: float,
) -> Tensor:  # fmt: skip
    """Return the gradient of logits [..., V], rounded once to their dtype."""
    columns = [
        each.reshape(-1) for each in (targets, entropy, normaliser, grad_logprob, grad_entropy)
    ]
    out: Tensor = kernels_of(logits).scores_gradients(as_rows(logits), *columns, temperature)
    return out.view(logits.shape)


def _backward(
    _wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    (logits, targets, temperature), (_, *kept) = inputs, results
    return [logits_gradient_op(logits, targets, *kept, *grads, temperature)]


# (logits [..., V], targets [...], temperature) -> (log-probabilities, entropies). The logits are
# what the backward pass reads.
score_logits = differentiable("linear_scores", score_logits_op, _backward, rows=(0, 1), returned=2)
