"""Rewards put together: a task's own, and others beside them."""

import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.tasks.contracts import Environment, Prompt, Task

RewardFn: TypeAlias = Callable[[Prompt, Any], float]


class WithRewards:
    """A task with more rewards; see `with_rewards`."""

    def __init__(
        self,
        task: Task | Environment,
        more: Mapping[str, RewardFn],
        weights: Mapping[str, float],
    ) -> None:
        self._task, self._more = task, dict(more)
        self.reward_weights = {**getattr(task, "reward_weights", {}), **weights}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied, it has nothing of its own yet
            raise AttributeError(name)
        return getattr(self._task, name)

    def reward(self, prompt: Prompt, outcome: Any) -> Mapping[str, float]:
        """Return the task's own rewards, and the others."""
        own = self._task.reward(prompt, outcome)
        both = own.keys() & self._more.keys()
        if both:
            raise ValueError(
                f"with_rewards expects new names, got {min(both)!r}, which {self.name!r} has."
            )
        return {**own, **{name: fn(prompt, outcome) for name, fn in self._more.items()}}


@checked
def with_rewards(
    task: Task | Environment,
    more: Mapping[str, RewardFn],
    weights: Mapping[str, float] | None = None,
) -> Any:
    """Return a task that gives more rewards beside its own.

    Args:
        task: any task or environment.
        more: name -> function of the prompt and of what the task itself rewards: the completion's
            text, or an environment's last state.
        weights: name -> factor, 1 when left out; the task keeps its own.

    Example:
        >>> import funcrl
        >>> from funcrl.tasks import Prompt, matches, with_rewards
        >>> task = with_rewards(
        ...     funcrl.tasks.SumDigits(), {"format": matches("[0-9]+")}, {"format": 0.5})
        >>> task.reward(Prompt("1+2=", "3"), "4"), task.reward_weights
        ({'correct': 0.0, 'format': 1.0}, {'format': 0.5})
    """
    if not more:
        raise ValueError("with_rewards expects at least one more reward, got none.")
    for name, function in more.items():
        checks.check_callable("with_rewards", name, function, "a function (prompt, completion)")
    unknown = set(weights or {}) - set(more)
    if unknown:
        raise ValueError(f"with_rewards expects weights of {sorted(more)}, got {min(unknown)!r}.")
    return WithRewards(task, more, weights or {})


@checked
def matches(pattern: str) -> RewardFn:
    """Return the reward that is 1 for a completion that a regular expression matches whole.

    A dot stands for a new line too.

    Example:
        >>> from funcrl.tasks import Prompt, matches
        >>> thinks = matches("<think>.*</think>.+")
        >>> thinks(Prompt("?"), "<think>Well.</think>5"), thinks(Prompt("?"), "5")
        (1.0, 0.0)
    """
    compiled = re.compile(pattern, re.DOTALL)

    @checked
    def reward(prompt: Prompt, completion: str) -> float:
        del prompt
        return float(compiled.fullmatch(completion) is not None)

    return reward
