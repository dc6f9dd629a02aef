"""Scores of tokens from rows of logits, and the gradient of the logits, by one kernel a pass."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcrl.core.custom_op import as_rows, differentiable, operator
from funcrl.core.numerics import at_least_float32
from funcrl.ops.exact.device import per_device
from funcrl.ops.exact.sums import exp, exp_or_zero, row_groups, row_sums

Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]


def _like(logits: Tensor, *_: Any) -> Triple:
    out = logits.new_empty(logits.shape[:-1], dtype=at_least_float32(logits.dtype))
    return out, torch.empty_like(out), torch.empty_like(out)


@operator("score_logits", _like, rows=(0, 1))
def score_logits_op(logits: Tensor, targets: Tensor, temperature: float) -> Triple:
    """Return log-probabilities of targets, entropies and log-normalisers of logits [..., V]."""
    found = scores_impl(as_rows(logits), targets.reshape(-1), temperature)
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
    out = scores_gradients_impl(
        as_rows(logits), targets.reshape(-1), entropy.reshape(-1), normaliser.reshape(-1),
        grad_logprob.reshape(-1), grad_entropy.reshape(-1), temperature,
    )  # fmt: skip
    return out.view(logits.shape)


def _backward(
    _wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    (logits, targets, temperature), (_, *kept) = inputs, results
    return [logits_gradient_op(logits, targets, *kept, *grads, temperature)]


# (logits [..., V], targets [...], temperature) -> (log-probabilities, entropies). The logits are
# what the backward pass reads.
score_logits = differentiable("linear_scores", score_logits_op, _backward, rows=(0, 1), returned=2)
# A sum of p log p that is nearer to 0 is that of a certain token: `exp` is never quite 0.
_CERTAIN = 1e-30


@per_device
def logsumexp_impl(logits: Tensor, temperature: float) -> Tensor:
    """Return log(sum(exp(z))) [M] of z = logits / temperature [M, V], in at least float32."""
    out = logits.new_empty(logits.shape[0], dtype=at_least_float32(logits.dtype))
    for rows in row_groups(*logits.shape):
        out[rows] = _normaliser(_scaled(logits[rows], temperature))
    return out


@per_device
def log_softmax_impl(logits: Tensor, temperature: float) -> Tensor:
    """Return z - logsumexp_impl(z) [M, V] of z = logits / temperature, in at least float32."""
    out = logits.new_empty(logits.shape, dtype=at_least_float32(logits.dtype))
    for rows in row_groups(*logits.shape):
        z = _scaled(logits[rows], temperature)
        torch.sub(z, _normaliser(z)[:, None], out=out[rows])
    return out


@per_device
def scores_impl(
    logits: Tensor, targets: Tensor, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-probability of the target, entropy, log-normaliser), each [M].

    With e = exp(z - max), the entropy is log(sum(e)) - sum(e (z - max)) / sum(e).
    """
    out = logits.new_empty(3, logits.shape[0], dtype=at_least_float32(logits.dtype))
    for rows in row_groups(*logits.shape):
        z = _scaled(logits[rows], temperature)
        largest = z.amax(dim=-1)
        shifted = z - largest[:, None]
        e = exp(shifted.clone())
        total = row_sums(e)
        log_total = total.log()
        normaliser = largest + log_total
        # A probability of 0 times a finite number, where a logit is -inf, is 0.
        inner = row_sums(e.mul_(shifted.clamp_(min=-1e3)))
        entropy = log_total - (inner / total).mul_(inner < -_CERTAIN)
        logprob = z.gather(-1, targets[rows, None]).squeeze(-1) - normaliser
        for column, part in zip(out, (logprob, entropy, normaliser), strict=True):
            column[rows] = part
    logprob, entropy, normaliser = (column.clone() for column in out)
    return logprob, entropy, normaliser


@per_device
def scores_gradients_impl(
    logits: Tensor, targets: Tensor, entropy: Tensor, normaliser: Tensor, grad_logprob: Tensor,
    grad_entropy: Tensor, temperature: float,
) -> Tensor:  # fmt: skip
    """Return the gradient [M, V] of logits, from those of logprob [M] and entropy [M].

    d logprob = onehot - p and d entropy = -p (log p + H), which is 0 where p is 0.
    """
    out = logits.new_empty(logits.shape)
    at, h, n, g_logprob, g_entropy = (
        column[:, None] for column in (targets, entropy, normaliser, grad_logprob, grad_entropy)
    )
    for rows in row_groups(*logits.shape):
        logprobs = _scaled(logits[rows], temperature) - n[rows]
        p = exp_or_zero(logprobs.clone())
        surprise = logprobs.clamp_(min=torch.finfo(p.dtype).min).add_(h[rows]).mul_(p)
        gradient = surprise.mul_(g_entropy[rows]).add_(p.mul_(g_logprob[rows])).neg_()
        gradient.scatter_add_(-1, at[rows], g_logprob[rows].to(p.dtype))
        out[rows] = gradient.div_(temperature)
    return out


def _normaliser(z: Tensor) -> Tensor:
    largest = z.amax(dim=-1)
    return largest + row_sums(exp(z - largest[:, None])).log()


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(at_least_float32(logits.dtype)).contiguous()
    return wide if temperature == 1.0 else wide / temperature
