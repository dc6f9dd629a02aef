"""Changes of a batch before its gradients, given the scores of the current policy.

A prepare function is `(scores [B, T], batch) -> batch`. `grpo_step(prepare=...)` scores the batch
once, without gradients, and calls it; a loop with several passes over a rollout calls
`funcrl.score` and the function itself, once, before the first.
"""

import torch
from torch import Tensor
from torch.func import vmap

from funcrl.core import checks, rng
from funcrl.core.arguments import Fraction, NotNegative, checked
from funcrl.core.types import Batch, CorrectionFn, PrepareFn, Rows, TokenScores
from funcrl.ops import attention
from funcrl.rl.ratios import sequence_mean


@checked
def top_entropy(fraction: Fraction) -> PrepareFn:
    """Return the function that keeps the policy gradient of the tokens of highest entropy.

    The advantages of all but the `fraction` of sampled tokens with the highest entropy, over the
    whole batch, become 0 (arXiv:2506.01939 uses 0.2; TRL's `top_entropy_quantile`). Token weights
    stay, so denominators and penalties do too. Ties with the last token kept are kept. Tokens that
    follow equal tokens at equal positions, as the first of each completion of a prompt, are ties
    whatever their scores were rounded to, in rows of their own and in packed ones.

    Args:
        fraction: of the sampled tokens to keep, rounded up.

    Example:
        >>> import torch, funcrl
        >>> batch = funcrl.Batch(
        ...     tokens=torch.ones(1, 3, dtype=torch.int64), positions=torch.arange(3)[None],
        ...     mask=torch.tensor([[False, True, True]]), behavior_logprobs=torch.zeros(1, 3),
        ...     advantages=torch.ones(1, 3), token_weights=torch.ones(1, 3))
        >>> scores = funcrl.TokenScores(torch.zeros(1, 3), torch.tensor([[9.0, 0.1, 0.7]]))
        >>> funcrl.top_entropy(0.5)(scores, batch).advantages
        tensor([[0., 0., 1.]])
    """

    @checked
    def prepare(scores: TokenScores, batch: Rows) -> Rows:
        checks.check_shape(
            "top_entropy", "scores.entropy", scores.entropy, "batch.mask", batch.mask.shape
        )
        entropy = torch.where(batch.mask, _equal_where_tied(scores.entropy, batch), -torch.inf)
        # In float64 and slightly reduced, so that 0.1 * 30 is not rounded up to 4 tokens.
        exact = batch.mask.sum().to(torch.float64) * fraction
        num_kept = torch.ceil(exact * (1 - 1e-12)).to(torch.int64)
        descending = entropy.reshape(-1).sort(descending=True).values
        threshold = descending.gather(0, (num_kept - 1).clamp(min=0)[None])
        keep = (entropy >= threshold) & batch.mask & (num_kept > 0)
        return batch._replace(advantages=torch.where(keep, batch.advantages, 0.0))

    return prepare


def _equal_where_tied(entropy: Tensor, batch: Rows) -> Tensor:
    """Return the entropy of each token [B, T] as that of the first one with the same context."""
    context, order = _contexts(batch).reshape(-1).sort(stable=True)
    is_first = torch.cat([context.new_ones(1) > 0, context[1:] != context[:-1]])
    places = torch.arange(len(context), device=context.device)
    first = torch.where(is_first, places, 0).cummax(dim=0).values
    of_first = entropy.reshape(-1)[order[first]]
    return torch.empty_like(of_first).scatter(0, order, of_first).reshape(entropy.shape)


def _contexts(batch: Rows) -> Tensor:
    """Return a hash [B, T] of what a token is predicted from: the tokens before it in its sample.

    It is the sum of a hash for each of them with its position, so that a prefix adds its own sum.
    """
    hashes = rng.splitmix64(batch.tokens ^ rng.splitmix64(batch.positions))
    before = hashes.cumsum(dim=1) - hashes
    if isinstance(batch, Batch):
        return before
    within = before - before.gather(1, attention.first_places(batch.segment_ids))
    if isinstance(batch.prefix_ids, tuple):
        return within
    # One more than the number of a segment, which is -1 for padding.
    totals = torch.zeros_like(torch.cat([hashes, hashes[:, :1]], dim=1))
    totals = totals.scatter_add(1, batch.segment_ids + 1, hashes)
    of_prefix = totals.gather(1, batch.prefix_ids + 1)
    return within + torch.where(batch.prefix_ids < 0, 0, of_prefix)


@checked
def off_policy_mask(threshold: NotNegative) -> PrepareFn:
    """Return the function that leaves out bad completions which the policy has moved away from.

    Where the advantage is negative and the generator's log-probabilities lie above the current
    policy's by more than `threshold`, as a mean over the completion's sampled tokens, the advantage
    becomes 0: DeepSeek-V3.2's mask (arXiv:2512.02556; TRL's `off_policy_mask_threshold`). Token
    weights stay, so denominators and penalties do too.

    Args:
        threshold: such as 0.05, in nats a token.

    Example:
        >>> import torch, funcrl
        >>> batch = funcrl.Batch(
        ...     tokens=torch.ones(2, 2, dtype=torch.int64), positions=torch.arange(2).expand(2, 2),
        ...     mask=torch.tensor([[False, True]] * 2), behavior_logprobs=torch.zeros(2, 2),
        ...     advantages=torch.tensor([[1.0, 1.0], [-1.0, -1.0]]), token_weights=torch.ones(2, 2))
        >>> scores = funcrl.TokenScores(torch.full((2, 2), -0.1), torch.zeros(2, 2))
        >>> funcrl.off_policy_mask(0.05)(scores, batch).advantages
        tensor([[1., 1.],
                [0., 0.]])
    """

    @checked
    def prepare(scores: TokenScores, batch: Rows) -> Rows:
        behavior, mask = batch.behavior_logprobs, batch.mask
        checks.check_shape(
            "off_policy_mask", "scores.logprobs", scores.logprobs, "batch.mask", mask.shape
        )
        above = torch.where(mask, behavior - scores.logprobs, 0.0)
        mean = vmap(sequence_mean)(above, mask, getattr(batch, "segment_ids", ()))
        keeps = (batch.advantages >= 0) | (mean <= threshold)
        return batch._replace(advantages=torch.where(keeps, batch.advantages, 0.0))

    return prepare


@checked
def recenter(correction: CorrectionFn) -> PrepareFn:
    """Return the function that takes the ratio against the current policy, not the generator.

    For several optimizer steps on one rollout, before the first: advantages are multiplied by the
    bounded importance weight of the current policy against the generator, and the current
    log-probabilities take the place of the generator's (decoupled PPO, arXiv:2110.00641). The
    first step's policy gradient is then what `correction=` in the algorithm gives. From here on
    the metrics under `sampling/`, and the weights of the "+" KL penalties, speak of the policy at
    this moment and no longer of the generator. As `grpo_step(prepare=...)` it recentres at every
    step; for several steps call it yourself, once.

    Args:
        correction: such as `funcrl.ratios.truncated(3.0)`.

    Example:
        >>> import torch, funcrl
        >>> batch = funcrl.Batch(
        ...     tokens=torch.ones(1, 2, dtype=torch.int64), positions=torch.arange(2)[None],
        ...     mask=torch.tensor([[False, True]]), behavior_logprobs=torch.tensor([[0.0, -2.0]]),
        ...     advantages=torch.tensor([[0.0, 1.0]]), token_weights=torch.ones(1, 2))
        >>> scores = funcrl.TokenScores(torch.tensor([[0.0, -1.0]]), torch.zeros(1, 2))
        >>> corrected = funcrl.recenter(funcrl.ratios.truncated(2.0))(scores, batch)
        >>> corrected.advantages, corrected.behavior_logprobs
        (tensor([[0., 2.]]), tensor([[ 0., -1.]]))
    """

    @checked
    def prepare(scores: TokenScores, batch: Rows) -> Rows:
        behavior = batch.behavior_logprobs
        checks.check_shape(
            "recenter", "scores.logprobs", scores.logprobs, "batch.mask", batch.mask.shape
        )
        log_ratio = torch.where(batch.mask, scores.logprobs - behavior, 0.0)
        segment_ids = getattr(batch, "segment_ids", ())
        weight = vmap(correction)(log_ratio, batch.mask, segment_ids)
        checks.check_shape("recenter", "correction(...)", weight, "batch.mask", batch.mask.shape)
        return batch._replace(
            advantages=batch.advantages * weight,
            # Outside the mask the generator's value stays: a step counts those not finite.
            behavior_logprobs=torch.where(batch.mask, scores.logprobs, behavior),
        )

    return prepare
