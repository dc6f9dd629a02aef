"""The named rewards of completions, or what went wrong with them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat

import torch

from funcrl.loop.episodes import Failure
from funcrl.tasks.contracts import Prompt, Task
from funcrl.tasks.rewards.calls import NOT_CAUGHT, RewardLimits
from funcrl.tasks.rewards.failures import describe_error, shorten
from funcrl.tasks.rewards.own import rewards_of

# Rewards are float32: what is larger would become infinite.
_LARGEST = torch.finfo(torch.float32).max
_LONGEST_SHOWN = 200  # characters of a completion, and of a prompt, in an error


class RewardError(ValueError):
    """A reward that raised, or that is not a finite number."""


class Rewarded(NamedTuple):
    """The named rewards of a completion, or none and what went wrong."""

    row: Mapping[str, float]
    error: str = ""
    cause: BaseException | None = None
    is_number: bool = True  # whether it failed, or is not finite, and not of another type


def batch_rewards(
    task: Task, prompts: Sequence[Prompt], outcomes: Sequence[Any], limits: RewardLimits
) -> list[Rewarded]:
    """Return the named rewards of completions, in their order.

    Args:
        task: whose rewards.
        prompts: [B].
        outcomes: [B] the texts of completions, or an environment's last states.
        limits: of rewards that are `async def`.
    """
    pairs = list(zip(prompts, outcomes, strict=True))
    played = [pair for pair in pairs if not isinstance(pair[1], Failure)]
    columns = [list(column) for column in zip(*played, strict=True)]
    results = iter(rewards_of(task, columns[0], columns[1], limits) if played else ())
    return [
        Rewarded({}, outcome.message)
        if isinstance(outcome, Failure)
        else _rewarded(task, prompt, outcome, next(results))
        for prompt, outcome in pairs
    ]


def _rewarded(task: Task, prompt: Prompt, outcome: Any, result: Any) -> Rewarded:
    """Return the rewards of one completion, after checking that they are numbers."""
    if isinstance(result, BaseException):
        what = describe_error(f"The reward of {task.name!r}", result)
        return Rewarded({}, f"{what} {_place(prompt, outcome)}.", result)
    if not result:
        return Rewarded({}, f"The reward of {task.name!r} is empty {_place(prompt, outcome)}.")
    for name, value in result.items():
        try:
            is_finite = _is_finite(value)
        except NOT_CAUGHT:
            raise
        except BaseException as error:  # of a value's own __float__
            what = describe_error(f"The reward {name!r} of {task.name!r}", error)
            return Rewarded({}, f"{what} {_place(prompt, outcome)}.", error)
        if not is_finite:
            what = f"The reward {name!r} of {task.name!r} is {shorten(repr(value), _LONGEST_SHOWN)}"
            place = _place(prompt, outcome)
            if isinstance(value, SupportsFloat):
                return Rewarded({}, f"{what} {place}.")
            missing = " (is a return missing?)" if value is None else ""
            return Rewarded({}, f"{what}, expected a number{missing}, {place}.", is_number=False)
    return Rewarded(dict(result))


def _place(prompt: Prompt, outcome: Any) -> str:
    return (
        f"for the completion {shorten(repr(outcome), _LONGEST_SHOWN)} of "
        f"{shorten(repr(prompt.text), _LONGEST_SHOWN)}"
    )


def _is_finite(value: Any) -> bool:
    """Return whether a reward is a number of float32."""
    try:
        return isinstance(value, SupportsFloat) and abs(float(value)) <= _LARGEST
    except (OverflowError, TypeError, ValueError):  # an integer too large, an array of several
        return False
