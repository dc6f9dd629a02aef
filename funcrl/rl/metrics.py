"""Metrics of steps and of rollouts, under TRL's names."""

import functools
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from funcrl.core import checks, numerics, tree
from funcrl.core.arguments import checked
from funcrl.core.rows import over_groups
from funcrl.core.types import Metrics, NamedRewards, PackedBatch, Rollout, Rows
from funcrl.parallel import Axis, all_gather
from funcrl.rl.batching import counted_tokens, sampled_tokens


@checked
def token_means(metrics: Metrics, num_tokens: Tensor) -> Metrics:
    """Return the metrics with each sum over tokens as a mean over tokens; 0 without tokens.

    Args:
        metrics: whose sums are all over tokens, as `policy_loss` gives them, summed over the batch.
        num_tokens: [] how many tokens that was.

    Example:
        >>> import torch, funcrl
        >>> metrics = funcrl.Metrics(
        ...     sums={"entropy": torch.tensor(6.0)}, means={}, maxes={}, last={})
        >>> funcrl.metrics.token_means(metrics, torch.tensor(4)).means
        {'entropy': tensor(1.5000)}
    """
    count = num_tokens.clamp(min=1)
    means = {name: value / count for name, value in metrics.sums.items()}
    return metrics._replace(sums={}, means=metrics.means | means)


@checked
def merge(reports: Sequence[Metrics], weights: Sequence[float | Tensor] = ()) -> Metrics:
    """Return one report of several, with each number reduced as its field of `Metrics` says.

        sums: sum_i x_i    means: sum_i w_i x_i / sum_i w_i    maxes: max_i x_i    last: x_n

    Args:
        reports: at least one, in the order in which they were made, all with the same names.
        weights: of each report's means, the number of tokens or samples that they are over; all
            reports count the same when left out. A mean is in float64, and 0 if all weights are 0.

    Example:
        >>> import torch, funcrl
        >>> reports = [
        ...     funcrl.Metrics(
        ...         sums={"num_tokens": count}, means={"entropy": value},
        ...         maxes={"grad_norm": value}, last={"learning_rate": value})
        ...     for count, value in torch.tensor([[1.0, 4.0], [3.0, 2.0]])]
        >>> funcrl.metrics.to_floats(funcrl.metrics.merge(reports, weights=[1, 3]))
        {'num_tokens': 4.0, 'entropy': 2.5, 'grad_norm': 4.0, 'learning_rate': 2.0}
    """
    if not reports:
        raise ValueError("merge expects at least one report, got none.")
    if weights and len(weights) != len(reports):
        raise ValueError(
            f"merge expects a weight for each of the {len(reports)} reports, got {len(weights)}."
        )
    for report in reports[1:]:
        tree.check_same_structure("merge", reports[0], report)
    weights = weights or [1] * len(reports)
    sums, means, maxes, last = zip(*reports, strict=True)
    return Metrics(
        sums=tree.map(lambda *values: sum(values[1:], values[0]), *sums),
        means=tree.map(lambda *values: _weighted_mean(values, weights), *means),
        maxes=tree.map(lambda *values: functools.reduce(torch.maximum, values), *maxes),
        last=last[-1],
    )


@checked
def merge_ranks(report: Metrics, weight: Tensor, axis: Axis) -> Metrics:
    """Return one report of those of all ranks of an axis, reduced as `merge` reduces several.

    Args:
        report: of this rank, with the same names on all ranks.
        weight: [] of its means.
        axis: whose ranks.

    Example:
        >>> import torch, funcrl
        >>> report = funcrl.Metrics(
        ...     sums={"num_tokens": torch.tensor(4)}, means={}, maxes={}, last={})
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.metrics.merge_ranks(report, torch.tensor(4), mesh.all).sums
        {'num_tokens': tensor(4)}
    """
    if axis.size == 1:
        return report
    leaves, unflatten = tree.flatten((report, weight))
    # Gathered, not reduced: the maximum of NaN and a number is NaN then, on every backend.
    own = torch.stack([leaf.to(torch.float64) for leaf in leaves])
    every = all_gather(own[None], axis).unbind()
    dtypes = [leaf.dtype for leaf in leaves]
    pairs = [
        unflatten([value.to(dtype) for value, dtype in zip(rank, dtypes, strict=True)])
        for rank in every
    ]
    return merge([found for found, _ in pairs], [found for _, found in pairs])


@checked
def to_floats(metrics: Metrics) -> dict[str, float]:
    """Return every metric as a Python number, for a log line; it waits for the device.

    Example:
        >>> import torch, funcrl
        >>> metrics = funcrl.Metrics(
        ...     sums={}, means={"loss": torch.tensor(0.5)},
        ...     maxes={"grad_norm": torch.tensor(2.0)}, last={})
        >>> funcrl.metrics.to_floats(metrics)
        {'loss': 0.5, 'grad_norm': 2.0}
    """
    names = Counter(name for field in metrics for name in field)
    if names.total() > len(names):
        twice = [name for name, count in names.items() if count > 1]
        raise ValueError(
            f"to_floats expects each name in one field of metrics, got {twice} in two."
        )
    return {name: value.item() for field in metrics for name, value in field.items()}


@checked
def padding_frac(batch: Rows) -> Tensor:
    """Return the share of a batch's tokens that a step computes for nothing.

    Those are all but the tokens of samples up to the last sampled one, and of shared prefixes.

    Args:
        batch: of samples in rows of their own, or packed.

    Example:
        >>> import torch, funcrl
        >>> mask = torch.tensor([[False, True, True, True], [False, True, False, False]])
        >>> nothing = torch.zeros(2, 4)
        >>> tokens = torch.zeros(2, 4, dtype=torch.int64)
        >>> batch = funcrl.Batch(tokens, tokens, mask, nothing, nothing, nothing)
        >>> funcrl.metrics.padding_frac(batch)
        tensor(0.2500)
    """
    wide = numerics.at_least_float32(batch.behavior_logprobs.dtype)
    if isinstance(batch, PackedBatch):
        needed = batch.segment_ids >= 0
    else:
        needed = sampled_tokens(batch).flip(-1).cumsum(dim=-1).flip(-1) > 0
    return 1 - needed.to(wide).mean()


@checked
def num_samples(batch: Rows) -> Tensor:
    """Return how many rows of a batch have a token to learn from.

    Example:
        >>> import torch, funcrl
        >>> mask, nothing = torch.tensor([[False, True], [False, False]]), torch.zeros(2, 2)
        >>> tokens = torch.zeros(2, 2, dtype=torch.int64)
        >>> batch = funcrl.Batch(tokens, tokens, mask, nothing, nothing, nothing)
        >>> funcrl.metrics.num_samples(batch)
        tensor(1)
    """
    return batch.mask.any(dim=1).sum()


@checked
def describe_rollout(
    rollout: Rollout, rewards: NamedRewards | None = None, truncated: Tensor | None = None
) -> dict[str, float]:
    """Return statistics of a rollout: rewards, lengths, and groups without differences.

    Args:
        rollout: of B rows.
        rewards: each reward function's own [B], NaN where it does not judge, reported as
            `rewards/<name>/mean` and `/std`.
        truncated: [B] bool, True where the completion was cut off; gives
            `completions/clipped_ratio`, and of the others, if there are any,
            `completions/{mean,min,max}_terminated_length`.

    Returns:
        `reward`, `reward_std` (the mean over groups of the group's deviation),
        `frac_reward_zero_std`, `completions/{mean,min,max}_length`, and
        `num_nonfinite_logprobs`, the sampled tokens that `collate` leaves out.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.ones(2, 3, dtype=torch.int64), group=torch.tensor([0, 0]),
        ...     mask=torch.tensor([[False, True, True], [False, True, False]]),
        ...     behavior_logprobs=torch.zeros(2, 3), rewards=torch.tensor([0.0, 1.0]),
        ...     policy_version=torch.zeros(2, dtype=torch.int64))
        >>> numbers = funcrl.metrics.describe_rollout(rollout)
        >>> numbers["reward"], numbers["completions/max_length"], numbers["frac_reward_zero_std"]
        (0.5, 2.0, 0.0)
    """
    checks.check_rank("describe_rollout", "rollout.mask", rollout.mask, "BT")
    checks.check_dtype("describe_rollout", "rollout.group", rollout.group, torch.int64)
    rows = torch.Size(rollout.mask.shape[:1])
    if rows[0] == 0:
        raise ValueError("describe_rollout expects at least one row, got an empty rollout.")
    by_row = {"rollout.rewards": rollout.rewards, "rollout.group": rollout.group}
    by_row |= {f"rewards[{name!r}]": named for name, named in (rewards or {}).items()}
    by_row |= {} if truncated is None else {"truncated": truncated}
    for what, value in by_row.items():
        checks.check_shape("describe_rollout", what, value, "rows", rows)
    # In the host's memory: a GPU would be asked for each of these small numbers.
    lengths = rollout.mask.sum(dim=1).to("cpu", torch.float32)
    total, group = _wide(rollout.rewards).cpu(), rollout.group.cpu()
    deviations = torch.stack(over_groups(_deviation, total, group, by_vmap=True)[0])
    left_out = rollout.mask & ~counted_tokens(rollout.mask, rollout.behavior_logprobs)
    values = {
        "reward": _mean(total),
        "reward_std": deviations.mean(),
        "frac_reward_zero_std": (deviations == 0).to(torch.float32).mean(),
        **_extent("length", lengths),
        "num_nonfinite_logprobs": left_out.sum(),
    }
    for name, named in (rewards or {}).items():
        judged = _wide(named).cpu()
        judged = judged[~judged.isnan()]
        if len(judged):
            values[f"rewards/{name}/mean"] = _mean(judged)
            values[f"rewards/{name}/std"] = _deviation(judged)
    if truncated is not None:
        cut = truncated.cpu()
        values["completions/clipped_ratio"] = cut.to(torch.float32).mean()
        values |= _extent("terminated_length", lengths[~cut]) if not cut.all() else {}
    return {name: value.item() for name, value in values.items()}


def _extent(name: str, lengths: Tensor) -> dict[str, Tensor]:
    """Return the mean, the least and the largest of lengths, under TRL's names."""
    return {
        f"completions/mean_{name}": lengths.mean(),
        f"completions/min_{name}": lengths.amin(),
        f"completions/max_{name}": lengths.amax(),
    }


def _weighted_mean(values: Sequence[Tensor], weights: Sequence[float | Tensor]) -> Tensor:
    wide = [
        torch.as_tensor(weight, dtype=torch.float64, device=values[0].device) for weight in weights
    ]
    weighed = [  # a report over no token does not count, be its mean NaN
        torch.where(weight > 0, value.to(torch.float64) * weight, 0.0)
        for value, weight in zip(values, wide, strict=True)
    ]
    total = sum(wide[1:], wide[0])
    return torch.where(total > 0, sum(weighed[1:], weighed[0]) / total, 0.0)


def _wide(rewards: Tensor) -> Tensor:
    """Return rewards in a floating-point dtype of at least float32."""
    return rewards.to(numerics.at_least_float32(rewards.dtype))


def _mean(rewards: Tensor) -> Tensor:
    """Return the mean, scaled so that the sum does not overflow."""
    unit = numerics.power_of_two(rewards)
    return (rewards / unit).mean() * unit


def _deviation(rewards: Tensor) -> Tensor:
    """Return the unbiased deviation, exactly 0 for equal rewards and for a single one."""
    if rewards.shape[0] < 2:
        return rewards.new_zeros(())
    unit = numerics.power_of_two(rewards)
    return torch.where((rewards == rewards[0]).all(), 0.0, (rewards / unit).std() * unit)
