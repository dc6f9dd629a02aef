"""Numbers to report: what a step measured, and what a rollout looked like, under TRL's names."""

import torch
from torch import Tensor

from funcrl.core import checks, numerics
from funcrl.core.arguments import checked
from funcrl.core.types import Metrics, NamedRewards, Rollout


@checked
def token_means(metrics: Metrics, num_tokens: Tensor) -> Metrics:
    """Return the metrics with each sum over tokens divided by their number; 0 without tokens.

    Args:
        metrics: sums over tokens, as `policy_loss` gives them, already summed over the batch.
        num_tokens: [] how many tokens that was.

    Example:
        >>> import torch, funcrl
        >>> metrics = funcrl.Metrics({"entropy": torch.tensor(6.0)}, {})
        >>> funcrl.metrics.token_means(metrics, torch.tensor(4)).sums
        {'entropy': tensor(1.5000)}
    """
    count = num_tokens.clamp(min=1)
    return metrics._replace(sums={name: value / count for name, value in metrics.sums.items()})


@checked
def to_floats(metrics: Metrics) -> dict[str, float]:
    """Return every metric as a Python number, for a log line; it waits for the device.

    Example:
        >>> import torch, funcrl
        >>> metrics = funcrl.Metrics({"loss": torch.tensor(0.5)}, {"grad_norm": torch.tensor(2.0)})
        >>> funcrl.metrics.to_floats(metrics)
        {'loss': 0.5, 'grad_norm': 2.0}
    """
    return {name: value.item() for name, value in (metrics.sums | metrics.maxes).items()}


@checked
def describe_rollout(
    rollout: Rollout, rewards: NamedRewards | None = None, truncated: Tensor | None = None
) -> dict[str, float]:
    """Return what a rollout looked like: rewards, lengths, groups that teach nothing.

    Args:
        rollout: of B rows.
        rewards: each reward function's own [B], reported as `rewards/<name>/mean` and `/std`.
        truncated: [B] bool, True where the completion was cut off; gives
            `completions/clipped_ratio`.

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
    rows = torch.Size(rollout.mask.shape[:1])
    checks.check_shape("describe_rollout", "rollout.rewards", rollout.rewards, "rows", rows)
    if rows[0] == 0:
        raise ValueError("describe_rollout expects at least one row, got an empty rollout.")
    checks.check_shape("describe_rollout", "rollout.group", rollout.group, "rows", rows)
    checks.check_dtype("describe_rollout", "rollout.group", rollout.group, torch.int64)
    lengths = rollout.mask.sum(dim=1).to(torch.float32)
    total = _wide(rollout.rewards)
    groups = [total[rollout.group == index] for index in rollout.group.unique()]
    deviations = torch.stack([_deviation(group) for group in groups])
    nonfinite = rollout.mask & ~rollout.behavior_logprobs.isfinite()
    values = {
        "reward": _mean(total),
        "reward_std": deviations.mean(),
        "frac_reward_zero_std": (deviations == 0).to(torch.float32).mean(),
        "completions/mean_length": lengths.mean(),
        "completions/min_length": lengths.amin(),
        "completions/max_length": lengths.amax(),
        "num_nonfinite_logprobs": nonfinite.sum(),
    }
    for name, named in (rewards or {}).items():
        checks.check_shape("describe_rollout", f"rewards[{name!r}]", named, "rows", rows)
        values[f"rewards/{name}/mean"] = _mean(_wide(named))
        values[f"rewards/{name}/std"] = _deviation(_wide(named))
    if truncated is not None:
        checks.check_shape("describe_rollout", "truncated", truncated, "rows", rows)
        values["completions/clipped_ratio"] = truncated.to(torch.float32).mean()
    return {name: value.item() for name, value in values.items()}


def _wide(rewards: Tensor) -> Tensor:
    """Return integer or boolean rewards, or low-precision ones, in at least float32."""
    return rewards.to(numerics.at_least_float32(rewards.dtype))


def _mean(rewards: Tensor) -> Tensor:
    """Return the mean, of units in which the sum does not overflow."""
    unit = numerics.power_of_two(rewards)
    return (rewards / unit).mean() * unit


def _deviation(rewards: Tensor) -> Tensor:
    """Return the unbiased deviation, exactly 0 for equal rewards and for a single one."""
    if rewards.shape[0] < 2 or bool((rewards == rewards[0]).all()):
        return rewards.new_zeros(())
    unit = numerics.power_of_two(rewards)
    return (rewards / unit).std() * unit
