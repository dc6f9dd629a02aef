"""A critic's advantages: generalised advantage estimation, as a `prepare` function."""

import torch
from torch import Tensor
from torch.func import vmap

from funcrl.core import checks, numerics
from funcrl.core.arguments import Fraction, Positive, checked
from funcrl.core.types import PackedBatch, PrepareFn, Rows, TokenScores
from funcrl.rl.ratios import sequence_sum


@checked
def gae(
    gamma: Fraction = 1.0,
    lam: Fraction = 0.95,
    *,
    returns_lam: Fraction | None = None,
    adaptive: Positive | None = None,
    whiten: bool = True,
) -> PrepareFn:
    """Return the function that gives a batch the advantages of a critic (arXiv:1506.02438).

        delta_t = r_t + gamma V_{t+1} - V_t,   A_t = delta_t + gamma lam A_{t+1}
        returns_t = V_t + A_t

    over the sampled tokens of a completion, those of an environment left out. The completion's
    reward, which is what each of its tokens has as advantage before (`funcrl.ppo` sees to that), is
    r_t at its last token; V is `scores.values`, those of `funcrl.logprob_fn(model, critic=True)`.
    They become the batch's `old_values`, too. As `grpo_step(prepare=...)` it is made anew at each
    step; for several steps of a rollout score the batch and call it yourself, once.

    Args:
        gamma: the discount.
        lam: how far rewards are looked ahead for, against the critic's own estimate.
        returns_lam: the same for the critic's targets, such as 1 (decoupled, arXiv:2503.01491);
            `lam` when left out.
        adaptive: alpha of a `lam` that is 1 - 1 / (alpha * length) for each completion
            (arXiv:2504.05118).
        whiten: shift and scale advantages over the batch to mean 0 and deviation 1.

    Example:
        >>> import torch, funcrl
        >>> batch = funcrl.Batch(
        ...     tokens=torch.ones(1, 3, dtype=torch.int64), positions=torch.arange(3)[None],
        ...     mask=torch.tensor([[False, True, True]]), behavior_logprobs=torch.zeros(1, 3),
        ...     advantages=torch.tensor([[0.0, 1.0, 1.0]]), token_weights=torch.ones(1, 3))
        >>> values = torch.tensor([[0.0, 0.5, 0.25]])
        >>> scores = funcrl.TokenScores(torch.zeros(1, 3), torch.zeros(1, 3), values=values)
        >>> prepared = funcrl.gae(lam=1.0, whiten=False)(scores, batch)
        >>> prepared.advantages, prepared.returns
        (tensor([[0.0000, 0.5000, 0.7500]]), tensor([[0., 1., 1.]]))
    """

    @checked
    def prepare(scores: TokenScores, batch: Rows) -> Rows:
        if isinstance(scores.values, tuple):
            raise ValueError(
                "gae expects scores with values, as funcrl.logprob_fn(model, critic=True) gives "
                "them, got none."
            )
        mask = batch.mask
        checks.check_shape("gae", "scores.values", scores.values, "batch.mask", mask.shape)
        values = torch.where(mask, scores.values, 0.0).to(
            numerics.at_least_float32(scores.values.dtype)
        )
        joined = _joined(batch)
        rewards = torch.where(mask & ~_has_next(mask, joined), batch.advantages, 0.0)
        next_values = joined * _shift(_from_right(values, joined * ~mask), 1)
        deltas = torch.where(mask, rewards + gamma * next_values - values, 0.0)

        def summed(lam: float | Tensor) -> Tensor:
            factor = torch.where(mask, gamma * lam * torch.ones_like(values), 1.0)
            return torch.where(mask, _from_right(deltas, joined * factor), 0.0)

        own_lam = lam if adaptive is None else 1 - 1 / (adaptive * _lengths(batch)).clamp(min=1)
        advantages = summed(own_lam)
        targets = advantages if returns_lam is None else summed(returns_lam)
        return batch._replace(
            advantages=_whitened(advantages, mask) if whiten else advantages,
            returns=values + targets,
            old_values=values,
        )

    return prepare


def _joined(batch: Rows) -> Tensor:
    """Return 1.0 where a token and the next one are of one sample, 0.0 elsewhere, [B, T]."""
    dtype = numerics.at_least_float32(batch.behavior_logprobs.dtype)
    same = torch.ones_like(batch.mask)
    if isinstance(batch, PackedBatch):
        ids = batch.segment_ids
        same = torch.cat([ids[:, :-1] == ids[:, 1:], torch.zeros_like(ids[:, :1]) > 0], dim=1)
    return same.to(dtype)


def _has_next(mask: Tensor, joined: Tensor) -> Tensor:
    """Return whether a sampled token of the same sample follows."""
    found = _from_right(mask.to(joined.dtype), joined * ~mask)
    return joined * _shift(found, 1) > 0


def _lengths(batch: Rows) -> Tensor:
    """Return the number of sampled tokens of each token's sample."""
    segment_ids = getattr(batch, "segment_ids", ())
    counted = batch.mask.to(numerics.at_least_float32(batch.behavior_logprobs.dtype))
    return vmap(sequence_sum)(counted, batch.mask, segment_ids)


def _from_right(values: Tensor, factors: Tensor) -> Tensor:
    """Return x_t = values_t + factors_t * x_{t+1} along the last axis, in log2(T) steps."""
    distance = 1
    while distance < values.shape[-1]:
        values = values + factors * _shift(values, distance)
        factors = factors * _shift(factors, distance)
        distance *= 2
    return values


def _shift(values: Tensor, distance: int) -> Tensor:
    """Return values moved to the left, 0 where there is none."""
    return torch.nn.functional.pad(values[..., distance:], (0, distance))


def _whitened(values: Tensor, mask: Tensor) -> Tensor:
    count = mask.sum().clamp(min=1)
    mean = values.sum() / count  # they are 0 outside the mask
    centered = torch.where(mask, values - mean, 0.0)
    variance = centered.square().sum() / (count - 1).clamp(min=1)
    return centered * torch.rsqrt(variance + 1e-8)
