"""Adds rewards to those of a task."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.tasks.adapt import changed, check_task
from funcrl.tasks.contracts import Prompt, Task, TaskLike
from funcrl.tasks.reward_calls import RewardLimits, run_calls
from funcrl.tasks.rewards import (
    calls_of,
    columns_of,
    form_of,
    own_calls,
    own_rewards,
    rewards_of_calls,
)

RewardFn: TypeAlias = Callable[[Prompt, Any], float]  # (prompt, completion) -> reward
_LIMITS = RewardLimits()


@checked
def with_rewards(
    task: TaskLike,
    more: Mapping[str, Callable[..., Any]],
    weights: Mapping[str, float] | None = None,
) -> Task:
    """Return a task that gives more rewards beside its own.

    A function gets the prompt and what the task itself rewards, the completion's text or an
    environment's last state; or what its parameters name: `prompt`, `completion`, `answer` and the
    columns of the task's data, or for a whole batch `prompts`, `completions` and columns. It
    returns a number, or several by name; for a batch a list of them. It may be `async def`.

    Args:
        task: any task or environment.
        more: name -> function.
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
        reward=partial(_reward, inner, dict(more)),
        reward_batch=partial(_reward_batch, inner, dict(more)),
        reward_weights={**inner.reward_weights, **(weights or {})},
    )


def _reward(
    task: Task, more: Mapping[str, Callable[..., Any]], prompt: Prompt, outcome: Any
) -> Mapping[str, float]:
    """Return a task's own rewards of one completion, and the others."""
    (found,) = _reward_batch(task, more, [prompt], [outcome])
    if isinstance(found, BaseException):
        raise found
    return found


def _reward_batch(
    task: Task,
    more: Mapping[str, Callable[..., Any]],
    prompts: Sequence[Prompt],
    outcomes: Sequence[Any],
    limits: RewardLimits = _LIMITS,
) -> list[Mapping[str, float] | BaseException]:
    """Return a task's own rewards of each completion, and the others, or the first error."""
    columns = columns_of(prompts[0])
    forms = {name: form_of(name, function, columns) for name, function in more.items()}
    own = own_calls(task, prompts, outcomes, limits)
    calls = [calls_of(forms[name], more[name], prompts, outcomes) for name in more]
    results = run_calls([*own, *chain(*calls)], limits)
    parts: list[Sequence[Mapping[str, float] | BaseException]] = [
        own_rewards(task, results[: len(own)], len(prompts))
    ]
    start = len(own)
    for (name, form), each in zip(forms.items(), calls, strict=True):
        part = results[start : start + len(each)]
        parts.append(rewards_of_calls(name, form, part, len(prompts)))
        start += len(each)
    return [_merged(task.name, row) for row in zip(*parts, strict=True)]


def _merged(
    task: str, parts: Sequence[Mapping[str, float] | BaseException]
) -> Mapping[str, float] | BaseException:
    """Return the rewards of a completion, by name; the first error if there is one."""
    row: dict[str, float] = {}
    for part in parts:
        if isinstance(part, BaseException):
            return part
        both = row.keys() & part.keys()
        if both:
            return ValueError(
                f"with_rewards expects new names, got {min(both)!r}, which {task!r} has."
            )
        row |= part
    return row


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
