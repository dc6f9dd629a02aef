"""Adds rewards to those of a task."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.tasks.adapt import changed, check_task
from funcrl.tasks.contracts import Prompt, Task, TaskLike

RewardFn: TypeAlias = Callable[[Prompt, Any], float]


@checked
def with_rewards(
    task: TaskLike,
    more: Mapping[str, RewardFn],
    weights: Mapping[str, float] | None = None,
) -> Task:
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
    inner = check_task("with_rewards", task)
    return changed(
        inner,
        reward=partial(_rewards, inner, dict(more)),
        reward_weights={**inner.reward_weights, **(weights or {})},
    )


def _rewards(
    task: Task, more: Mapping[str, RewardFn], prompt: Prompt, outcome: Any
) -> Mapping[str, float]:
    """Return a task's own rewards, and the others."""
    own = task.reward(prompt, outcome)
    both = own.keys() & more.keys()
    if both:
        raise ValueError(
            f"with_rewards expects new names, got {min(both)!r}, which {task.name!r} has."
        )
    return {**own, **{name: fn(prompt, outcome) for name, fn in more.items()}}


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
