"""Sums of several rewards, and a punishment of overlong completions."""

import torch
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import Finite, checked
from funcrl.core.types import NamedRewards


@checked
def weighted_sum(rewards: NamedRewards, weights: dict[str, Finite] | None = None) -> Tensor:
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
    if not rewards:
        raise ValueError("weighted_sum expects at least one named reward, got none.")
    factors = dict.fromkeys(rewards, 1.0) if weights is None else weights
    if factors.keys() != rewards.keys():
        raise ValueError(
            f"weighted_sum expects weights for each of {sorted(rewards)}, got {sorted(factors)}."
        )
    first = next(iter(rewards))
    for name, values in rewards.items():
        what = f"rewards[{name!r}]"
        checks.check_rank("weighted_sum", what, values, "B")
        checks.check_shape("weighted_sum", what, values, first, rewards[first].shape)
        if not values.isfinite().all():
            row = int((~values.isfinite()).nonzero()[0])
            raise ValueError(
                f"weighted_sum expects finite rewards, got {values[row].item()} from {name!r} in "
                f"row {row}."
            )
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
