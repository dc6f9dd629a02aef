"""Ratios of the policy to the one that sampled, and bounded importance corrections.

A ratio function is `(logprobs, behavior_logprobs, mask, segment_ids) -> Ratio`, all [T]. Outside
the mask both log-probabilities must be finite; their ratio there is never used.
"""

from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from funcrl.core import checks, numerics
from funcrl.core.arguments import NotNegative, Positive, checked
from funcrl.core.printing import remembers
from funcrl.core.types import Absent, CorrectionFn, Ratio, RatioFn

# Whether each token has a ratio of its own, or a completion one for all.
Level: TypeAlias = Literal["token", "sequence"]


@checked
def token(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, segment_ids: Tensor | Absent = ()
) -> Ratio:
    """Return `pi(token) / pi_behavior(token)` for each token, as PPO and GRPO use it.

    Example:
        >>> import torch, funcrl
        >>> logprobs, mask = torch.tensor([0.25, 0.5]).log(), torch.tensor([True, True])
        >>> funcrl.ratios.token(logprobs, torch.tensor([0.5, 0.5]).log(), mask).ratio
        tensor([0.5000, 1.0000])
    """
    del mask, segment_ids
    ratio = numerics.exp_ratio(_log_ratio("token", logprobs, behavior_logprobs))
    return Ratio(ratio, torch.ones_like(ratio))


@checked
def sequence(
    logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, segment_ids: Tensor | Absent = ()
) -> Ratio:
    """Return GSPO's ratio of whole completions, the same at each token (arXiv:2507.18071).

        s = exp(mean over the completion's tokens of log(pi / pi_behavior))

    Example:
        >>> import torch, funcrl
        >>> logprobs, mask = torch.tensor([0.25, 1.0]).log(), torch.tensor([True, True])
        >>> funcrl.ratios.sequence(logprobs, torch.tensor([0.5, 0.5]).log(), mask).ratio
        tensor([1., 1.])
    """
    log_ratio = _log_ratio("sequence", logprobs, behavior_logprobs)
    checks.check_shape("sequence", "mask", mask, "logprobs", logprobs.shape)
    ratio = numerics.exp_ratio(sequence_mean(log_ratio, mask, segment_ids))
    return Ratio(ratio, torch.ones_like(ratio))


@checked
@remembers
def corrected(ratio_fn: RatioFn, correction: CorrectionFn) -> RatioFn:
    """Return `ratio_fn` against the current policy, with a bounded weight against the generator.

    The generator (vLLM, another precision, older weights) is not quite the trainer's policy.
    Instead of clipping against it, the surrogate's ratio is taken against the current policy,
    where it is 1 and carries the gradient, and a bounded, constant importance weight multiplies
    the advantage: truncated importance sampling. It is meant for one optimizer step a rollout;
    with several, `funcrl.recenter` puts both into the batch once, before the first.

    Example:
        >>> import torch, funcrl
        >>> ratio_fn = funcrl.ratios.corrected(funcrl.ratios.token, funcrl.ratios.truncated(2.0))
        >>> logprobs, mask = torch.tensor([0.9, 0.5]).log(), torch.tensor([True, True])
        >>> ratio_fn(logprobs, torch.tensor([0.1, 0.5]).log(), mask, ())
        Ratio(ratio=tensor([1., 1.]), correction=tensor([2., 1.]))
    """

    @checked
    def ratio(
        logprobs: Tensor, behavior_logprobs: Tensor, mask: Tensor, segment_ids: Tensor | Absent
    ) -> Ratio:
        current = logprobs.detach()
        near_one = ratio_fn(logprobs, current, mask, segment_ids)
        log_ratio = _log_ratio("corrected", current, behavior_logprobs)
        weight = correction(log_ratio, mask, segment_ids)
        checks.check_shape("corrected", "correction(...)", weight, "logprobs", logprobs.shape)
        return near_one._replace(correction=near_one.correction * weight)

    return ratio


@checked
@remembers
def truncated(cap: Positive = 3.0, level: Level = "token") -> CorrectionFn:
    """Return the correction `min(pi / pi_behavior, cap)`: truncated importance sampling.

    Args:
        cap: the largest weight (TRL's `vllm_importance_sampling_clip_max`).
        level: "token" for a weight of each token, "sequence" for the product over a completion.

    Example:
        >>> import torch, funcrl
        >>> correction = funcrl.ratios.truncated(cap=3.0)
        >>> correction(torch.tensor([2.0, 0.0]), torch.tensor([True, True]), ())
        tensor([3., 1.])
    """
    return _bounded("truncated", level, lambda weight: weight.clamp(max=cap))


@checked
@remembers
def masked(
    cap: Positive = 3.0, floor: NotNegative = 0.0, level: Level = "sequence"
) -> CorrectionFn:
    """Return the correction `pi / pi_behavior` where it lies in `[floor, cap]`, and 0 elsewhere.

    The defaults are TRL's `sequence_mask`.

    Args:
        cap: a larger weight is left out.
        floor: a smaller weight is left out.
        level: "token" for a weight of each token, "sequence" for the product over a completion.

    Example:
        >>> import torch, funcrl
        >>> correction = funcrl.ratios.masked(cap=3.0, level="token")
        >>> correction(torch.tensor([2.0, 0.0]), torch.tensor([True, True]), ())
        tensor([0., 1.])
    """
    if floor > cap:
        raise ValueError(f"masked expects floor <= cap = {cap}, got {floor}.")
    return _bounded(
        "masked",
        level,
        lambda weight: torch.where((weight >= floor) & (weight <= cap), weight, 0.0),
    )


def _bounded(function: str, level: Level, bound: Callable[[Tensor], Tensor]) -> CorrectionFn:
    """Return the correction `bound(pi / pi_behavior)` of each token, or of each completion."""

    @checked
    def correction(log_ratio: Tensor, mask: Tensor, segment_ids: Tensor | Absent) -> Tensor:
        if level == "sequence":
            checks.check_shape(function, "mask", mask, "log_ratio", log_ratio.shape)
            log_ratio = sequence_sum(log_ratio, mask, segment_ids)
        return bound(numerics.exp_ratio(log_ratio))

    return correction


def _log_ratio(function: str, logprobs: Tensor, behavior_logprobs: Tensor) -> Tensor:
    checks.check_shape(function, "behavior_logprobs", behavior_logprobs, "logprobs", logprobs.shape)
    return logprobs - behavior_logprobs


@checked
def sequence_sum(values: Tensor, mask: Tensor, segment_ids: Tensor | Absent = ()) -> Tensor:
    """Return at each token the sum over the masked tokens of its sample.

    Args:
        values: [T].
        mask: [T] bool.
        segment_ids: [T] of a packed row, whose segments are samples; the row is one when left out.

    Example:
        >>> import torch, funcrl
        >>> values, mask = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([False, True, True])
        >>> funcrl.ratios.sequence_sum(values, mask)
        tensor([6., 6., 6.])
        >>> funcrl.ratios.sequence_sum(values, mask, torch.tensor([0, 0, 1]))
        tensor([2., 2., 4.])
    """
    checks.check_shape("sequence_sum", "mask", mask, "values", values.shape)
    kept = torch.where(mask, values, torch.zeros_like(values))
    if isinstance(segment_ids, tuple):
        return kept.sum().expand_as(values)
    # T^2 work, but a fixed order of sums: index_add on a GPU gives other bits at each call.
    same_segment = segment_ids[:, None] == segment_ids[None, :]
    return same_segment.to(kept.dtype) @ kept


@checked
def sequence_mean(values: Tensor, mask: Tensor, segment_ids: Tensor | Absent = ()) -> Tensor:
    """Return at each token the mean over the masked tokens of its sample, 0 where it has none.

    Args:
        values: [T].
        mask: as of `sequence_sum`.
        segment_ids: as of `sequence_sum`.

    Example:
        >>> import torch, funcrl
        >>> values, mask = torch.tensor([1.0, 2.0, 4.0]), torch.tensor([False, True, True])
        >>> funcrl.ratios.sequence_mean(values, mask)
        tensor([3., 3., 3.])
    """
    count = sequence_sum(mask.to(values.dtype), mask, segment_ids)
    return sequence_sum(values, mask, segment_ids) / count.clamp(min=1)
