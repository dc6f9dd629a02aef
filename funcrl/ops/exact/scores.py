"""Scores of rows of logits by one kernel a pass, and of tokens, for trainer, sampler and vLLM."""

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.custom_op import as_rows, differentiable, operator, per_device
from funcrl.core.numerics import at_least_float32, pairwise_sum
from funcrl.ops.arithmetic import cap_gradient, cap_logits
from funcrl.ops.exact.linear import (
    add_weight_gradient_impl,
    linear,
    linear_forward,
    weight_gradient_impl,
)
from funcrl.ops.exact.segments import exp, exp_or_zero, row_groups, row_sums

Triple = tuple[Tensor, Tensor, Tensor]


def _like_logits(logits: Tensor, *_: Any) -> Triple:
    out = logits.new_empty(logits.shape[:-1], dtype=at_least_float32(logits.dtype))
    return out, torch.empty_like(out), torch.empty_like(out)


@operator("score_logits", _like_logits, rows=(0, 1))
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


def _logits_backward(
    _wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    (logits, targets, temperature), (_, *kept) = inputs, results
    return [logits_gradient_op(logits, targets, *kept, *grads, temperature)]


# (logits [..., V], targets [...], temperature) -> (log-probabilities, entropies). The logits are
# what the backward pass reads.
score_logits = differentiable(
    "linear_scores", score_logits_op, _logits_backward, rows=(0, 1), returned=2
)
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


Pair = tuple[Tensor, Tensor]


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return log-probabilities over the last axis [..., V], in at least float32.

    Its numbers are those of `linear_scores`, to the last bit; it has no derivative.
    """
    return log_softmax_impl(as_rows(logits), temperature).view(logits.shape)


def _like(hidden: Tensor, *_: Any) -> Triple:
    out = hidden.new_empty(hidden.shape[:-1], dtype=numerics.at_least_float32(hidden.dtype))
    return out, torch.empty_like(out), torch.empty_like(out)


def _count(hidden: Sequence[int], weight: Sequence[int], *_: Any) -> int:
    return 2 * math.prod(hidden) * weight[0]


@operator("linear_scores", _like, rows=(0, 2), flops=_count)
def linear_scores_op(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int,
    cap: float | None,
) -> Triple:  # fmt: skip
    """Return log-probabilities, entropies and log-normalisers of rows of `hidden W^T`."""
    cast = weight.to(hidden.dtype)
    rows, flat = as_rows(hidden), targets.reshape(-1)
    parts = [
        scores_impl(
            cap_logits(linear_forward(rows[part], cast, None), cap), flat[part], temperature
        )
        for part in _chunks(0, max(len(rows), 1), chunk)
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
    grad_logprob: Tensor, grad_entropy: Tensor, temperature: float, chunk: int,
    cap: float | None, blocks: int, trained: bool,
) -> Pair:  # fmt: skip
    """Return the gradients of the rows and of the weight, whose logits are computed anew."""
    cast, rows = weight.to(hidden.dtype), as_rows(hidden)
    targets, entropy, normaliser, grad_logprob, grad_entropy = (
        each.reshape(-1) for each in (targets, entropy, normaliser, grad_logprob, grad_entropy)
    )
    grad_hidden = torch.empty_like(rows)

    def of_chunk(part: slice) -> Tensor:
        """Return the gradient of the logits of some rows; write that of the rows."""
        logits = cap_logits(linear_forward(rows[part], cast, None), cap)
        grad = scores_gradients_impl(
            logits, targets[part], entropy[part], normaliser[part], grad_logprob[part],
            grad_entropy[part], temperature,
        )  # fmt: skip
        grad = cap_gradient(grad, logits, cap)
        del logits  # it need not be in memory beside what follows
        grad_hidden[part] = linear_forward(grad, cast.mT, None)
        return grad

    def of_block(block: slice) -> Tensor:
        """Return the weight's gradient of a block of rows."""
        first, *others = _chunks(block.start, block.stop, chunk)
        total: Tensor = weight_gradient_impl(of_chunk(first), rows[first])
        for part in others:
            add_weight_gradient_impl(total, of_chunk(part), rows[part])
        return total

    if trained and len(rows):
        found = pairwise_sum(map(of_block, _chunks(0, len(rows), -(-len(rows) // blocks))))
        return grad_hidden.view(hidden.shape), found
    for part in _chunks(0, len(rows), chunk):
        of_chunk(part)
    nothing = weight.new_zeros(
        weight.shape if trained else (0,), dtype=numerics.at_least_float32(hidden.dtype)
    )
    return grad_hidden.view(hidden.shape), nothing


def _forward(
    hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, chunk: int,
    cap: float | None, _blocks: int,
) -> Triple:  # fmt: skip
    return linear_scores_op(hidden, weight, targets, temperature, chunk, cap)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    (hidden, weight, targets, *constants), (_, *kept) = inputs, results
    given = hidden, weight, targets, *kept, *grads, *constants
    grad_hidden, grad_weight = gradients_op(*given, bool(wanted[1]))
    found = [grad_hidden, grad_weight.to(weight.dtype)]
    return [each for each, want in zip(found, wanted, strict=False) if want]


_linear_scores = differentiable("linear_scores", _forward, _backward, rows=(0, 2), returned=2)


@operator("cap_logits", lambda logits, _: torch.empty_like(logits), rows=(0,))
def cap_op(logits: Tensor, cap: float) -> Tensor:
    """Return capped logits, as an operator."""
    return cap_logits(logits.contiguous(), cap)


@operator("cap_gradient", lambda grad, *_: torch.empty_like(grad), rows=(0, 1))
def cap_gradient_op(grad: Tensor, capped: Tensor, cap: float) -> Tensor:
    """Return the gradient of logits from that of capped ones."""
    return cap_gradient(grad.contiguous(), capped, cap)


def _cap_forward(logits: Tensor, cap: float) -> tuple[Tensor]:
    return (cap_op(logits, cap),)


def _cap_backward(
    _wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    return [cap_gradient_op(grads[0], results[0], inputs[1])]


_cap_logits = differentiable("linear_scores", _cap_forward, _cap_backward, rows=(0,))


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    temperature: float,
    chunk: int | Literal["all"],
    cap: float | None = None,
    blocks: int = 1,
) -> Pair:
    """Return log-probabilities and entropies of targets under the logits `hidden W^T`.

    Logits of `chunk` rows are in memory at a time; with "all" those of all rows, which the backward
    pass then reads. The weight's gradient sums each of so many blocks of rows for itself.
    """
    if chunk == "all":
        logits = linear(hidden, weight, None, blocks)
        logits = logits if cap is None else _cap_logits(logits, cap)
        logprobs, entropy = score_logits(logits, targets, temperature)
        return logprobs, entropy
    logprobs, entropy = _linear_scores(hidden, weight, targets, temperature, chunk, cap, blocks)
    return logprobs, entropy


def _chunks(start: int, stop: int, chunk: int) -> Iterator[slice]:
    return (slice(at, min(at + chunk, stop)) for at in range(start, stop, chunk))
