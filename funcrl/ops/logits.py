"""Scores of rows of logits: log-probabilities, entropies, and their gradients."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.arguments import checked
from funcrl.core.custom_op import differentiable
from funcrl.ops.exact.scores import logits_gradient_op, score_logits_op


@checked
def entropy(log_softmax: Tensor) -> Tensor:
    """Return `-sum p log p` over the last axis, given `log p`; a token of probability 0 adds 0.

    Recorded op by op it would keep three more tensors of [T, V] for a backward pass that mostly
    never comes: an entropy is reported at each step, and differentiated only for a bonus.

    Args:
        log_softmax: [..., V], normalised log-probabilities; -inf is allowed.

    Example:
        >>> import torch, funcrl
        >>> funcrl.ops.entropy(torch.tensor([0.5, 0.5, 0.0]).log())
        tensor(0.6931)
    """
    result: Tensor = _Entropy.apply(log_softmax)  # type: ignore[no-untyped-call]  # (torch's own)
    return result


class _Entropy(torch.autograd.Function):
    """The op as an autograd function that works under grad, vmap and make_fx."""

    generate_vmap_rule = True

    @staticmethod
    def forward(log_softmax: Tensor) -> Tensor:
        # entr(p) = -p log p, and 0 at p = 0.
        return torch.special.entr(log_softmax.exp()).sum(dim=-1)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        del output
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        # d(-p log p) / d(log p) = -p (log p + 1), which is 0 at p = 0 and not 0 * -inf.
        (log_softmax,) = ctx.saved_tensors
        finite = log_softmax.clamp(min=torch.finfo(log_softmax.dtype).min)
        return -log_softmax.exp() * (finite + 1) * grad[..., None]


Triple: TypeAlias = tuple[Tensor, Tensor, Tensor]


def plain_score_logits(logits: Tensor, targets: Tensor, temperature: float) -> Triple:
    """Return log-probabilities of targets, entropies and log-normalisers of logits [..., V].

    In at least float32. A token of probability 0 adds 0 to the entropy.
    """
    if _has_kernel(logits):
        found: Triple = score_logits_op(logits, targets, temperature)
        return found
    wide = widened(logits, temperature)
    normaliser = torch.logsumexp(wide, dim=-1)
    chosen = wide.gather(-1, targets[..., None]).squeeze(-1)
    logprobs = wide - normaliser[..., None]
    del wide
    probabilities = logprobs.exp()
    # A log-probability of -inf adds 0: a probability of 0 times the least number.
    terms = logprobs.clamp_(min=torch.finfo(logprobs.dtype).min).mul_(probabilities)
    return chosen - normaliser, terms.sum(dim=-1).neg(), normaliser


def logits_gradient(
    logits: Tensor, temperature: float, targets: Tensor, entropy: Tensor, normaliser: Tensor,
    grad_logprob: Tensor, grad_entropy: Tensor,
) -> Tensor:  # fmt: skip
    """Return the gradient of logits [..., V], in their dtype.

    It writes in place only into what has every batch axis that the values written can have.
    """
    if _has_kernel(logits):
        rows = targets, entropy, normaliser, grad_logprob, grad_entropy
        found: Tensor = logits_gradient_op(logits, *rows, temperature)
        return found
    # d logprob = onehot - p and d entropy = -p (log p + H).
    logprobs = widened(logits, temperature) - normaliser[..., None]
    probabilities = logprobs.exp()
    # Where a log-probability is -inf, p and the whole gradient are 0.
    surprise = logprobs.clamp(min=torch.finfo(logprobs.dtype).min)
    del logprobs
    surprise = surprise.add_(entropy[..., None]).mul_(probabilities)
    gradient = surprise * grad_entropy[..., None]
    del surprise
    gradient = torch.addcmul(gradient, probabilities, grad_logprob[..., None]).neg_()
    del probabilities
    gradient = gradient.scatter_add(-1, targets[..., None], grad_logprob[..., None])
    return gradient.div_(temperature).to(logits.dtype)


def _backward(
    _wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    (logits, targets, temperature), (_, *kept) = inputs, results
    return [logits_gradient(logits, temperature, targets, *kept, *grads)]


_score_logits = differentiable(
    "linear_scores",
    plain_score_logits,
    _backward,
    rows=(0, 1),
    returned=2,
    instead="logprob_fn(model, chunk=None) has them all",
)


def score_logits(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Return log-probabilities of targets and entropies, whose derivative reads the logits."""
    logprobs, entropy = _score_logits(logits, targets, temperature)
    return logprobs, entropy


def _has_kernel(logits: Tensor) -> bool:
    return logits.device.type == "cuda" and logits.dtype in (torch.bfloat16, torch.float16)


def widened(logits: Tensor, temperature: float) -> Tensor:
    """Return logits in at least float32, widened before they are divided."""
    wide = logits.to(numerics.at_least_float32(logits.dtype))
    return wide if temperature == 1.0 else wide / temperature
