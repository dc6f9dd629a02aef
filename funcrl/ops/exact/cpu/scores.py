"""Log-probability and entropy of tokens from rows of logits."""

import torch
from torch import Tensor

from funcrl.core.numerics import at_least_float32
from funcrl.ops.exact.cpu.sums import exp, exp_or_zero, row_groups, row_sums

# A sum of p log p that is nearer to 0 is that of a certain token: `exp` is never quite 0.
_CERTAIN = 1e-30


def logsumexp(logits: Tensor, temperature: float) -> Tensor:
    """Return log(sum(exp(z))) [M] of z = logits / temperature [M, V], in at least float32."""
    out = logits.new_empty(logits.shape[0], dtype=at_least_float32(logits.dtype))
    for rows in row_groups(*logits.shape):
        out[rows] = _normaliser(_scaled(logits[rows], temperature))
    return out


def log_softmax(logits: Tensor, temperature: float) -> Tensor:
    """Return z - logsumexp(z) [M, V] of z = logits / temperature, in at least float32."""
    out = logits.new_empty(logits.shape, dtype=at_least_float32(logits.dtype))
    for rows in row_groups(*logits.shape):
        z = _scaled(logits[rows], temperature)
        torch.sub(z, _normaliser(z)[:, None], out=out[rows])
    return out


def scores(logits: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor, Tensor]:
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


def scores_gradients(
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
