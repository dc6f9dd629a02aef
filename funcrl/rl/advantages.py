"""Advantages from rewards: functions of one group's rewards [G], and their lifts to a batch.

An algorithm's advantage is a function `(rewards [B], group [B]) -> [B]`; `by_group` makes one of
a function of a single group.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from funcrl.core import checks, numerics
from funcrl.core.arguments import NotNegative, checked
from funcrl.core.printing import remembers
from funcrl.core.rows import over_groups


@checked
def raw(rewards: Tensor) -> Tensor:
    """Return the rewards themselves: no baseline (Williams 1992).

    Example:
        >>> import torch, funcrl
        >>> funcrl.advantages.raw(torch.tensor([1.0, 3.0]))
        tensor([1., 3.])
    """
    _check_group("raw", rewards)
    return rewards


@checked
def center(rewards: Tensor) -> Tensor:
    """Return `r - mean(r)`, exactly 0 where all rewards of the group are equal.

    The advantage of Dr. GRPO (arXiv:2503.20783).

    Args:
        rewards: [G], the rewards of one group.

    Example:
        >>> import torch, funcrl
        >>> funcrl.advantages.center(torch.tensor([1.0, 3.0]))
        tensor([-1.,  1.])
    """
    _check_group("center", rewards)
    # The mean of equal numbers can differ from them in the last bit, and a later division by the
    # deviation would blow that bit up into an advantage.
    constant = rewards == rewards[:1]
    unit = numerics.power_of_two(rewards)
    scaled = rewards / unit  # whose sum does not overflow
    return torch.where(constant.all(), torch.zeros_like(rewards), (scaled - scaled.mean()) * unit)


@checked
def standardize(rewards: Tensor, eps: NotNegative = 1e-6) -> Tensor:
    """Return `(r - mean(r)) / (std(r) + eps)` with the unbiased deviation; 0 for equal rewards.

    The advantage of GRPO (arXiv:2402.03300). A group of one has no deviation and gets 0.

    Args:
        rewards: [G], the rewards of one group.
        eps: added to the deviation (1e-6 in verl and tunix, 1e-4 in TRL).

    Example:
        >>> import torch, funcrl
        >>> funcrl.advantages.standardize(torch.tensor([0.0, 2.0, 1.0]), eps=0.0)
        tensor([-1.,  1.,  0.])
    """
    _check_group("standardize", rewards)
    unit = numerics.power_of_two(rewards)
    centered = center(rewards / unit)
    return _divide(centered, _deviation(centered), eps, unit)


@checked
def leave_one_out(rewards: Tensor) -> Tensor:
    """Return `r_i - mean of the other rewards of the group`.

    The advantage of RLOO (arXiv:2402.14740); equal to `center(r) * G / (G - 1)`.

    Args:
        rewards: [G], the rewards of one group, at least two.

    Example:
        >>> import torch, funcrl
        >>> funcrl.advantages.leave_one_out(torch.tensor([1.0, 3.0]))
        tensor([-2.,  2.])
    """
    _check_group("leave_one_out", rewards)
    size = rewards.shape[0]
    if size < 2:
        raise ValueError(f"leave_one_out expects at least 2 rewards in a group, got {size}.")
    return center(rewards) * (size / (size - 1))


_OURS = (raw, center, standardize, leave_one_out)  # what a user's function does, vmap may refuse


@checked
@remembers
def by_group(fn: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Return `(rewards [B], group [B]) -> [B]` that applies `fn` to each group by itself.

    Groups may have different sizes and may be interleaved.

    Example:
        >>> import torch, funcrl
        >>> lifted = funcrl.advantages.by_group(funcrl.advantages.center)
        >>> lifted(torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1]))
        tensor([-1.,  1.,  0.,  0.])
    """

    @checked
    def advantage(rewards: Tensor, group: Tensor) -> Tensor:
        _check_groups("by_group", rewards, group)
        is_ours = getattr(fn, "func", fn) in _OURS
        parts, order = over_groups(partial(_of_group, fn), rewards, group, by_vmap=is_ours)
        return torch.cat(parts)[torch.argsort(order)]

    return advantage


def _of_group(fn: Callable[[Tensor], Tensor], rewards: Tensor) -> Tensor:
    """Return the advantages of one group, after checking that there is one for each reward."""
    found: object = fn(rewards)
    if not isinstance(found, Tensor) or found.shape != rewards.shape:
        got = list(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise ValueError(
            f"by_group expects {getattr(fn, '__name__', type(fn).__name__)} to return advantages "
            f"[G] of the rewards [G] of one group, got {got} of {rewards.shape[0]} rewards."
        )
    return found


@checked
def standardize_by_batch(rewards: Tensor, group: Tensor, eps: NotNegative = 1e-6) -> Tensor:
    """Return `(r - mean of its group) / (std of all rewards + eps)`.

    The "batch" scaling of TRL: one deviation for all groups, so that an easy prompt's small
    differences are not blown up to the size of a hard one's.

    Args:
        rewards: [B].
        group: [B], equal for samples of one prompt.
        eps: added to the deviation.

    Example:
        >>> import torch, funcrl
        >>> rewards, group = torch.tensor([0.0, 2.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
        >>> funcrl.advantages.standardize_by_batch(rewards, group, eps=0.0)
        tensor([-1.2247,  1.2247,  0.0000,  0.0000])
    """
    _check_groups("standardize_by_batch", rewards, group)
    unit = numerics.power_of_two(rewards)
    scaled = rewards / unit
    return _divide(by_group(center)(scaled, group), _deviation(center(scaled)), eps, unit)


def _deviation(centered: Tensor) -> Tensor:
    """Return the unbiased deviation of centered numbers near 1, whose squares stay in range."""
    return (centered.square().sum() / max(centered.shape[0] - 1, 1)).sqrt()


def _divide(centered: Tensor, deviation: Tensor, eps: float, unit: Tensor) -> Tensor:
    """Return `centered / (deviation + eps)`, where both are given in multiples of `unit`.

    It is 0 for 0 / 0: equal rewards with `eps=0`.
    """
    scale = torch.add(deviation, unit.reciprocal(), alpha=eps)
    return torch.where(scale == 0, torch.zeros_like(centered), centered / scale)


def _check_group(function: str, rewards: Tensor) -> None:
    checks.check_rank(function, "rewards", rewards, "G")
    checks.check_floating(function, "rewards", rewards)


def _check_groups(function: str, rewards: Tensor, group: Tensor) -> None:
    checks.check_rank(function, "rewards", rewards, "B")
    checks.check_shape(function, "group", group, "rewards", rewards.shape)
    checks.check_dtype(function, "group", group, torch.int64)
    if rewards.shape[0] == 0:
        raise ValueError(f"{function} expects at least one reward, got none.")
