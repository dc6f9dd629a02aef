"""Grades completions: named rewards, their weighted sum, or what went wrong."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, SupportsFloat

import torch
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.types import Algorithm
from funcrl.loop.episodes import Failure
from funcrl.rl import rewards
from funcrl.tasks.adapt import check_task
from funcrl.tasks.contracts import Prompt, Task, TaskLike
from funcrl.tasks.reward_calls import NOT_CAUGHT, RewardLimits, describe_error, shorten
from funcrl.tasks.rewards import RewardLog, TrainerState, rewards_of

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
    extra: Mapping[str, Any] | None = None  # what reward functions log of it


class RewardedBatch(NamedTuple):
    """The rewards of completions, and what reward functions have logged."""

    rows: list[Rewarded]
    metrics: Mapping[str, list[float]]


def batch_rewards(
    task: Task,
    prompts: Sequence[Prompt],
    outcomes: Sequence[Any],
    limits: RewardLimits,
    completion_ids: Sequence[Sequence[int]] | None = None,
    trainer_state: TrainerState | None = None,
) -> RewardedBatch:
    """Return the named rewards of completions, in their order.

    Args:
        task: whose rewards.
        prompts: [B].
        outcomes: [B] the texts of completions, or an environment's last states.
        limits: of rewards that are `async def`.
        completion_ids: [B] the tokens of each completion, for functions that take them.
        trainer_state: for functions that take it.
    """
    places = [place for place, each in enumerate(outcomes) if not isinstance(each, Failure)]
    log = RewardLog(len(places))
    known: dict[str, Any] = {"log_metric": log.log_metric, "log_extra": log.log_extra}
    if completion_ids is not None:
        known["completion_ids"] = [completion_ids[place] for place in places]
    if trainer_state is not None:
        known["trainer_state"] = trainer_state
    played = [prompts[place] for place in places], [outcomes[place] for place in places]
    rows = [Rewarded({}, each.message if isinstance(each, Failure) else "") for each in outcomes]
    results = rewards_of(task, *played, limits, known) if places else []
    for number, (place, result) in enumerate(zip(places, results, strict=True)):
        extra = {column: values[number] for column, values in log.columns.items()}
        found = _rewarded(task, prompts[place], outcomes[place], result)
        rows[place] = found._replace(extra=extra)
    return RewardedBatch(rows, log.metrics)


def _rewarded(task: Task, prompt: Prompt, outcome: Any, result: Any) -> Rewarded:
    """Return the rewards of one completion, after checking that they are numbers."""
    if isinstance(result, BaseException):
        what = describe_error(f"The reward of {task.name!r}", result)
        return Rewarded({}, f"{what} {_place(prompt, outcome)}.", result)
    if not result:
        return Rewarded({}, f"The reward of {task.name!r} is empty {_place(prompt, outcome)}.")
    judged = {name: value for name, value in result.items() if value is not None}
    for name, value in (judged or result).items():
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
    # A function that returns None does not judge this completion; another one does.
    return Rewarded({name: judged.get(name, math.nan) for name in result})


def _place(prompt: Prompt, outcome: Any) -> str:
    return (
        f"for the completion {shorten(repr(outcome), _LONGEST_SHOWN)} of "
        f"{shorten(repr(prompt.text), _LONGEST_SHOWN)}"
    )


def _is_finite(value: Any) -> bool:
    """Return whether a reward is a number of float32."""
    is_number = isinstance(value, (float, int, SupportsFloat))  # the last of which is slow
    try:
        return is_number and abs(float(value)) <= _LARGEST
    except (OverflowError, TypeError, ValueError):  # an integer too large, an array of several
        return False


class Graded(NamedTuple):
    """Rewards of completions."""

    rewards: dict[str, Tensor]  # name -> [B], each function's own; NaN where it does not judge
    total: Tensor  # [B], weighted; NaN where there is none
    errors: list[str]  # what went wrong, one for each NaN of `total`
    metrics: Mapping[str, float] = MappingProxyType({})  # that reward functions have logged
    extra: Sequence[Mapping[str, Any]] = ()  # [B] what they have logged of each completion


@checked
def grade(
    task: TaskLike,
    prompts: Sequence[Prompt],
    outcomes: Sequence[Any],
    weights: Mapping[str, float] | None = None,
    on_error: Literal["stop", "skip"] = "stop",
    limits: RewardLimits | None = None,
    completion_ids: Sequence[Sequence[int]] | None = None,
    trainer_state: TrainerState | None = None,
) -> Graded:
    """Return every completion's rewards, and their weighted sum.

    Args:
        task: whose `reward_batch` to call, which calls `reward` for each if it is not overridden.
        prompts: [B].
        outcomes: [B] the texts of completions, or an environment's last states.
        weights: name -> factor; of those left out, the task's `reward_weights`, or else 1.
        on_error: "stop" raises a `RewardError` at the first reward that raises or is not finite;
            "skip" gives that completion no total.
        limits: of rewards that are `async def`; 32 at a time and 30 s each when left out.
        completion_ids: [B] the tokens of each completion, for reward functions that take them.
        trainer_state: how far the run is, for reward functions that take it.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.SumDigits()
        >>> prompt = funcrl.tasks.Prompt("1+2=", "3")
        >>> funcrl.rollouts.grade(task, [prompt, prompt], ["3", "4"]).total
        tensor([1., 0.])
    """
    task = check_task("grade", task)
    if len(prompts) != len(outcomes):
        raise ValueError(
            f"grade expects a prompt for each outcome, such as the prompts of what complete "
            f"returns, got {len(prompts)} prompts and {len(outcomes)} outcomes."
        )
    if completion_ids is not None and len(completion_ids) != len(outcomes):
        raise ValueError(
            f"grade expects the tokens of each outcome as completion_ids, got "
            f"{len(completion_ids)} for {len(outcomes)} outcomes."
        )
    more = (limits or RewardLimits(), completion_ids, trainer_state)
    rewarded = batch_rewards(task, prompts, outcomes, *more)
    return graded_of(task, rewarded, weights, on_error)


def graded_of(
    task: Task,
    rewarded: RewardedBatch,
    weights: Mapping[str, float] | None,
    on_error: Literal["stop", "skip"],
) -> Graded:
    """Return the rewards of completions as tensors, and their weighted sum."""
    rows: list[Mapping[str, float]] = []
    errors: list[str] = []
    for row, error, cause, is_number, _ in rewarded.rows:
        if error:
            if on_error == "stop":
                advice = " --on-reward-error skip leaves such samples out." if is_number else ""
                raise RewardError(f"{error}{advice}") from cause
            errors.append(error)
        rows.append(row)
    good = [row for row in rows if row]
    if not good:
        found = f"only errors: {errors[0]}" if errors else "no completions"
        raise RewardError(f"grade expects at least one reward, got {found}")
    names = list(good[0])
    for row in good:
        if set(row) != set(names):
            raise RewardError(
                f"grade expects the same rewards for every completion, got {sorted(names)} and "
                f"{sorted(row)} from the task {task.name!r}."
            )
    parts = {name: _float32([float(row.get(name, torch.nan)) for row in rows]) for name in names}
    failed = torch.tensor([not row for row in rows], device="cpu")
    kept = {name: values[~failed].nan_to_num() for name, values in parts.items()}
    total = _float32([torch.nan] * len(rows))
    given = {**task.reward_weights, **(weights or {})}
    unknown = sorted(given.keys() - names)
    if unknown:
        raise ValueError(
            f"grade expects weights (--reward-weights) of the rewards {sorted(names)}, got one of "
            f"{unknown[0]!r}."
        )
    total[~failed] = rewards.weighted_sum(kept, dict.fromkeys(names, 1.0) | given)
    metrics = {name: sum(found) / len(found) for name, found in rewarded.metrics.items()}
    return Graded(parts, total, errors, metrics, [each.extra or {} for each in rewarded.rows])


@checked
def punish_overlong(graded: Graded, lengths: Tensor, max_length: int, cache: int) -> Graded:
    """Return the rewards with DAPO's soft overlong punishment, `overlong`, among them.

    Args:
        graded: [B].
        lengths: [B] of the completions, in tokens.
        max_length: from here on the punishment is 1.
        cache: over how many tokens before it grows.

    Example:
        >>> import torch, funcrl
        >>> graded = funcrl.rollouts.Graded({"correct": torch.ones(2)}, torch.ones(2), [])
        >>> funcrl.rollouts.punish_overlong(graded, torch.tensor([5, 8]), 10, cache=4).total
        tensor([1.0000, 0.5000])
    """
    if "overlong" in graded.rewards:
        raise ValueError("punish_overlong expects no reward of that name, got 'overlong'.")
    checks.check_shape("punish_overlong", "lengths", lengths, "graded.total", graded.total.shape)
    punishment = rewards.soft_overlong(lengths, max_length, cache)
    named = {**graded.rewards, "overlong": punishment}
    return graded._replace(rewards=named, total=graded.total + punishment)


@checked
def accuracies(task: TaskLike, graded: Graded) -> Tensor:
    """Return the reward [B] that a task names as its accuracy; NaN where there is none.

    A task that names none has `correct`, or else the first reward: `is_accuracy` tells whether that
    is right or wrong.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.SumDigits()
        >>> graded = funcrl.rollouts.grade(task, [funcrl.tasks.Prompt("1+2=", "3")], ["3"])
        >>> funcrl.rollouts.accuracies(task, graded)
        tensor([1.])
    """
    return graded.rewards[judging_reward(task, graded)]


@checked
def judging_reward(task: TaskLike, graded: Graded) -> str:
    """Return the name of the reward that an evaluation is about: the task's accuracy.

    Of a task that names none it is `correct`, or else the first.

    Example:
        >>> import torch, funcrl
        >>> graded = funcrl.rollouts.Graded({"correct": torch.ones(2)}, torch.ones(2), [])
        >>> funcrl.rollouts.judging_reward(funcrl.tasks.SumDigits(), graded)
        'correct'
    """
    task = check_task("judging_reward", task)
    correct = "correct" if "correct" in graded.rewards else next(iter(graded.rewards), "correct")
    name = task.accuracy or correct
    if name not in graded.rewards:
        raise ValueError(
            f"judging_reward expects the task {task.name!r} to have a reward {name!r}, the mean of "
            f"which is eval/accuracy, got {sorted(graded.rewards)}; name one as its `accuracy`."
        )
    return name


@checked
def is_accuracy(task: TaskLike, name: str, rewards: Tensor) -> bool:
    """Return whether a reward says what is right or wrong, so that its mean is an accuracy.

    One that the task names as its accuracy, or that is called `correct`, may be right in part. Any
    other one, such as the only reward function of a file of rows, is 0 or 1 throughout.

    Args:
        task: whose reward it is.
        name: of the reward.
        rewards: [B], NaN where there is none.

    Example:
        >>> import torch, funcrl
        >>> task = funcrl.tasks.from_rows([{"prompt": "1", "answer": "2"}])
        >>> lengths, matches = torch.tensor([0.3, 1.2]), torch.tensor([0.0, 1.0])
        >>> [funcrl.rollouts.is_accuracy(task, "mine", each) for each in (lengths, matches)]
        [False, True]
    """
    task = check_task("is_accuracy", task)
    found = rewards[rewards.isfinite()]
    if task.accuracy or name == "correct":
        return bool(((found >= 0) & (found <= 1)).all())
    return bool(((found == 0) | (found == 1)).all())


@checked
def comparable(total: Tensor, group_size: int) -> Tensor:
    """Return the totals [B] with NaN for a sample that is the only one of its group with a total.

    There is nothing to compare it with. In groups of one, each is.

    Example:
        >>> import torch, funcrl
        >>> nan = float("nan")
        >>> funcrl.rollouts.comparable(torch.tensor([1.0, nan, 0.0, 1.0]), group_size=2)
        tensor([nan, nan, 0., 1.])
    """
    graded = total.isfinite().view(-1, group_size).sum(dim=1).repeat_interleave(group_size)
    return total.masked_fill(graded < min(2, group_size), torch.nan)


def worth_of(algorithm: Algorithm, graded: Graded, group_size: int) -> Tensor:
    """Return what each completion is worth to an algorithm, [B]; NaN for one of no use.

    That is one without a reward, or with nothing in its group to be compared with, where neither a
    critic nor a teacher says what was to be expected.
    """
    compares = algorithm.weight != () and algorithm.value_weight == ()
    return comparable(graded.total, group_size) if compares else graded.total


def _float32(values: list[float]) -> Tensor:
    """Return numbers as a tensor on the CPU, where rewards are."""
    return torch.tensor(values, dtype=torch.float32, device="cpu")


@checked
def named_rewards(task: Task, prompt: Prompt, outcome: Any) -> tuple[Mapping[str, float], str]:
    """Return a completion's named rewards, or none and what went wrong.

    Args:
        task: whose `reward` to call.
        prompt: that was completed.
        outcome: the text of the completion, or an environment's last state.

    Example:
        >>> import funcrl
        >>> prompt = funcrl.tasks.Prompt("1+2=", "3")
        >>> funcrl.rollouts.named_rewards(funcrl.tasks.SumDigits(), prompt, "3")
        ({'correct': 1.0}, '')
    """
    (rewarded,) = batch_rewards(task, [prompt], [outcome], RewardLimits()).rows
    return rewarded.row, rewarded.error
