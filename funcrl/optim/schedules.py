"""Learning-rate schedules: functions of the number of updates done, which is a tensor."""

import math
from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from funcrl.core.arguments import Count, NotNegative, checked

Schedule: TypeAlias = Callable[[Tensor], Tensor]  # (number of updates done) -> learning rate


@checked
def constant(value: NotNegative) -> Schedule:
    """Return the schedule that is always `value`.

    Example:
        >>> import torch, funcrl
        >>> funcrl.optim.constant(0.5)(torch.tensor(3))
        tensor(0.5000, dtype=torch.float64)
    """

    @checked
    def schedule(count: Tensor) -> Tensor:
        return torch.full_like(count, value, dtype=torch.float64)

    return schedule


@checked
def linear(initial: NotNegative, final: NotNegative, steps: Count) -> Schedule:
    """Return the schedule from `initial` to `final` on a line of `steps`, then `final`.

    Example:
        >>> import torch, funcrl
        >>> funcrl.optim.linear(1.0, 0.0, steps=4)(torch.tensor(1))
        tensor(0.7500, dtype=torch.float64)
    """

    @checked
    def schedule(count: Tensor) -> Tensor:
        return initial + (final - initial) * _progress(count, steps)

    return schedule


@checked
def cosine(initial: NotNegative, final: NotNegative, steps: Count) -> Schedule:
    """Return the schedule from `initial` to `final` on half a cosine, then `final`.

    SGDR without restarts (arXiv:1608.03983).

    Example:
        >>> import torch, funcrl
        >>> funcrl.optim.cosine(1.0, 0.0, steps=4)(torch.tensor(2))
        tensor(0.5000, dtype=torch.float64)
    """

    @checked
    def schedule(count: Tensor) -> Tensor:
        return final + (initial - final) * (1 + torch.cos(math.pi * _progress(count, steps))) / 2

    return schedule


@checked
def warmup(steps: Count, then: Schedule) -> Schedule:
    """Return `then`, preceded by `steps` updates that rise on a line to its first value.

    The first update already moves: its rate is `then(0) / (steps + 1)`, not 0.

    Example:
        >>> import torch, funcrl
        >>> schedule = funcrl.optim.warmup(3, then=funcrl.optim.constant(1.0))
        >>> [schedule(torch.tensor(count)).item() for count in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    @checked
    def schedule(count: Tensor) -> Tensor:
        rising = then(torch.zeros_like(count)) * _progress(count + 1, steps + 1)
        return torch.where(count < steps, rising, then((count - steps).clamp(min=0)))

    return schedule


def _progress(count: Tensor, steps: int) -> Tensor:
    return (count.to(torch.float64) / steps).clamp(max=1.0)
