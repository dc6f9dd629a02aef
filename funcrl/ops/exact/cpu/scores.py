"""Log-probability and entropy of tokens from rows of logits."""

import torch
from torch import Tensor

from funcrl.ops.exact.cpu.sums import exp, row_sums, wide_dtype


def logsumexp(logits: Tensor, temperature: float) -> Tensor:
    """Return log(sum(exp(z))) [M] of z = logits / temperature [M, V], in at least float32."""
    z = _scaled(logits, temperature)
    largest = z.amax(dim=-1)
    return largest + row_sums(exp(z - largest[:, None])).log()


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return z - logsumexp(z) [M, V] of z = logits / temperature, in at least float32."""
    return _scaled(logits, temperature) - logsumexp(logits, temperature)[:, None]


def scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return (log-probability of the target, entropy, log-normaliser), each [M].

    With e = exp(z - max), the entropy is log(sum(e)) - sum(e (z - max)) / sum(e).
    """
    z = _scaled(logits, temperature)
    largest = z.amax(dim=-1)
    shifted = z - largest[:, None]
    e = exp(shifted.clone())
    total = row_sums(e)
    normaliser = largest + total.log()
    logprob = z.gather(-1, targets[:, None]).squeeze(-1) - normaliser
    # A probability of 0 times the least number, where a logit is -inf, is 0.
    inner = row_sums(e.mul_(shifted.clamp_(min=torch.finfo(z.dtype).min)))
    return logprob, total.log() - inner / total, normaliser


def scores_gradients(
    logits: Tensor, targets: Tensor, entropy: Tensor, normaliser: Tensor, grad_logprob: Tensor,
    grad_entropy: Tensor, temperature: float,
) -> Tensor:  # fmt: skip
    """Return the gradient [M, V] of logits, from those of logprob [M] and entropy [M]."""
    logprobs = _scaled(logits, temperature) - normaliser[:, None]
    p = exp(logprobs.clone())
    # d logprob = onehot - p and d entropy = -p (log p + H), which is 0 where p is 0.
    surprise = logprobs.clamp_(min=torch.finfo(p.dtype).min).add_(entropy[:, None])
    gradient = surprise.mul_(p).mul_(grad_entropy[:, None]).add_(p.mul_(grad_logprob[:, None]))
    gradient = gradient.neg_()
    gradient.scatter_add_(-1, targets[:, None], grad_logprob[:, None].to(p.dtype))
    return gradient.div_(temperature).to(logits.dtype)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    wide = logits.to(wide_dtype(logits)).contiguous()
    return wide if temperature == 1.0 else wide / temperature
