"""Sums of several rewards, and a punishment of overlong completions."""

import torch
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.types import NamedRewards


@checked
def weighted_sum(rewards: NamedRewards, weights: dict[str, float] | None = None) -> Tensor:
    """Return `sum_k weight_k * reward_k`, the "sum then normalize" of several reward functions.

    Args:
        rewards: name -> [B].
        weights: name -> factor, 1 for all when left out.

    Example:
        >>> import torch, funcrl
        >>> parts = {"right": torch.tensor([1.0, 0.0]), "format": torch.tensor([1.0, 1.0])}
        >>> funcrl.rewards.weighted_sum(parts, {"right": 1.0, "format": 0.5})
        tensor([1.5000, 0.5000])
    """
    factors = _checked_factors("weighted_sum", rewards, weights)
    weighted = [factors[name] * _as_floating(rewards[name]) for name in rewards]
    return torch.stack(weighted).sum(dim=0)


@checked
def soft_overlong(lengths: Tensor, max_length: int, cache: int) -> Tensor:
    """Return DAPO's soft overlong punishment of each completion (arXiv:2503.14476, eq. 13).

        0                                      if length <= max_length - cache
        ((max_length - cache) - length) / cache     up to max_length
        -1                                     beyond

    Args:
        lengths: [B], completion lengths in tokens.
        max_length: from here on the punishment is whole.
        cache: over how many tokens before `max_length` it grows.

    Example:
        >>> import torch, funcrl
        >>> funcrl.rewards.soft_overlong(torch.tensor([5, 8, 10, 12]), max_length=10, cache=4)
        tensor([ 0.0000, -0.5000, -1.0000, -1.0000])
    """
    checks.check_rank("soft_overlong", "lengths", lengths, "B")
    checks.check_range("soft_overlong", "cache", cache, 1, max_length)
    return (_as_floating(max_length - cache - lengths) / cache).clamp(min=-1.0, max=0.0)


def _as_floating(values: Tensor) -> Tensor:
    """Return integers and bools as float32, whatever torch's default is."""
    return values if values.is_floating_point() else values.to(torch.float32)


def _checked_factors(
    function: str, rewards: NamedRewards, weights: dict[str, float] | None
) -> dict[str, float]:
    """Return the factor of each reward after checking names, shapes and values."""
    if not rewards:
        raise ValueError(f"{function} expects at least one named reward, got none.")
    factors = dict.fromkeys(rewards, 1.0) if weights is None else weights
    if factors.keys() != rewards.keys():
        raise ValueError(
            f"{function} expects a weight for each of {sorted(rewards)}, got {sorted(factors)}."
        )
    for name, factor in factors.items():
        checks.check_finite(function, f"weights[{name!r}]", factor)
    first = next(iter(rewards))
    for name, values in rewards.items():
        checks.check_rank(function, f"rewards[{name!r}]", values, "B")
        checks.check_shape(function, f"rewards[{name!r}]", values, first, rewards[first].shape)
        if not values.isfinite().all():
            row = int((~values.isfinite()).nonzero()[0])
            raise ValueError(
                f"{function} expects finite rewards, got {values[row].item()} from {name!r} "
                f"in row {row}."
            )
    return factors
