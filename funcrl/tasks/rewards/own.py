"""The rewards that a task itself gives: of one completion, or of a whole batch."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from funcrl.tasks.contracts import Prompt, Task
from funcrl.tasks.named import arguments_taken
from funcrl.tasks.rewards.calls import RewardLimits, run_calls
from funcrl.tasks.rewards.functions import as_list, named


def rewards_of(
    task: Task, prompts: Sequence[Prompt], outcomes: Sequence[Any], limits: RewardLimits
) -> list[Mapping[str, Any] | BaseException]:
    """Return the named rewards of each completion, or the exception that was raised for it.

    Args:
        task: whose rewards.
        prompts: [B], at least one.
        outcomes: [B] the texts of completions, or an environment's last states.
        limits: of rewards that are `async def`.
    """
    return own_rewards(
        task, run_calls(own_calls(task, prompts, outcomes, limits), limits), len(prompts)
    )


def own_calls(
    task: Task, prompts: Sequence[Prompt], outcomes: Sequence[Any], limits: RewardLimits
) -> list[Callable[[], Any]]:
    """Return the calls of a task's `reward`, or one of its `reward_batch` if it has its own."""
    if has_own_batch(task):
        return [partial(call_batch, task, prompts, outcomes, limits)]
    return [partial(task.reward, *pair) for pair in zip(prompts, outcomes, strict=True)]


def own_rewards(
    task: Task, results: Sequence[Any], count: int
) -> list[Mapping[str, Any] | BaseException]:
    """Return what the calls of `own_calls` returned as named rewards."""
    if has_own_batch(task):
        (result,) = results
        results = as_list(result, count)
    name = task.accuracy or "correct"
    return [each if isinstance(each, BaseException) else named(name, each) for each in results]


def has_own_batch(task: Task) -> bool:
    """Return whether a task rewards a batch in a way of its own."""
    return getattr(task.reward_batch, "__func__", None) is not Task.reward_batch


def call_batch(
    task: Task, prompts: Sequence[Prompt], outcomes: Sequence[Any], limits: RewardLimits
) -> Any:
    """Return what a task's `reward_batch` returns; one of a user's own may know of no limits."""
    named_limits = {"limits": limits} if arguments_taken(task.reward_batch, ["limits"]) else {}
    return task.reward_batch(prompts, outcomes, **named_limits)
