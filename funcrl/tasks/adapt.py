"""Makes a `Task`, with all its members, of any object with the needed ones, and adds rewards."""

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, TypeAlias

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.files import brief
from funcrl.tasks.contracts import Environment, Prompt, Task, TaskLike, Tokenizer
from funcrl.tasks.reward_calls import RewardLimits, run_calls
from funcrl.tasks.rewards import (
    calls_of,
    columns_of,
    form_of,
    own_calls,
    own_rewards,
    rewards_of_calls,
)

_METHODS = ("demonstrate", "extract")
_METHODS_TO_ACT = ("begin", "act", "observe")
_METHODS_OF_TOKENIZER = ("encode", "decode", "encode_answer", "encode_reply", "encode_results")


class TaskError(ValueError):
    """A task that called `sys.exit`, whose tokenizer raised, or whose prompts have no text."""


def guard(task: Task) -> Task:
    """Return the task, whose `sys.exit`, wrong prompts and tokenizer's errors become `TaskError`.

    Its rewards are left as they are: what calls them knows which of them raised.
    """
    tokenizer = TokenizerStandIn(
        task.tokenizer,
        **{name: partial(_call_tokenizer, task, name) for name in _METHODS_OF_TOKENIZER},
    )
    methods = _METHODS + (_METHODS_TO_ACT if isinstance(task, Environment) else ())
    guarded = {name: partial(_call, task, name, getattr(task, name)) for name in methods}
    guarded |= {name: partial(_call_prompts, task, name) for name in ("prompts", "eval_prompts")}
    return changed(task, tokenizer=tokenizer, **guarded)


def _call(task: Task, label: str, method: Callable[..., Any], *args: Any, **named: Any) -> Any:
    try:
        return method(*args, **named)
    except SystemExit as error:
        raise TaskError(
            f"The task {task.name!r} called sys.exit({error.code!r}) in {label}"
        ) from error


def _call_prompts(task: Task, name: str, *args: Any, **named: Any) -> Any:
    """Return the prompts that a method of the task returns; raise if they have no text."""
    found = _call(task, name, getattr(task, name), *args, **named)
    if found is None and name == "eval_prompts":
        return ()
    listed = found if hasattr(found, "__len__") else [found]
    wrong = [each for each in listed if not hasattr(each, "text")]
    if wrong:
        raise TaskError(
            f"{name}() of the task {task.name!r} is expected to return a list of "
            f"funcrl.tasks.Prompt(text, answer), got {brief(wrong[0])}."
        )
    return found


def _call_tokenizer(task: Task, name: str, *args: Any, **named: Any) -> Any:
    """Return what a method of the tokenizer returns; whatever it raises names the task."""
    method = getattr(task.tokenizer, name)
    try:
        return _call(task, f"tokenizer.{name}", method, *args, **named)
    except Exception as error:
        given = ", ".join(repr(each)[:80] for each in (*args, *named.values()))
        raise TaskError(
            f"The tokenizer of the task {task.name!r} raised {type(error).__name__}: "
            f"{error} from {name}({given})."
        ) from error


_NEEDED = ("tokenizer", "prompts", "reward")
_NEEDED_TO_ACT = ("max_turns", "begin", "act", "observe")
_NEEDED_OF_TOKENIZER = ("vocab_size", "end", "encode", "decode")
_MAY_BE_NONE = ("end",)
_ABSENT = object()


@checked
def check_task(function: str, task: object) -> Task:
    """Return an object as a `Task`, or as an `Environment` if it has `act`; raise if it is neither.

    Optional members that the object lacks have the defaults of the base class; its name is that
    of its class.

    Args:
        function: whose argument it is.
        task: any object.

    Example:
        >>> import funcrl
        >>> from funcrl.tasks import check_task
        >>> check_task("train", funcrl.tasks.SumDigits()).max_turns
        1
    """
    if isinstance(task, type):
        raise TypeError(f"{function} expects a task, got the class {task.__name__}.")
    if _acts(task):
        _check_members(function, "an environment", task, Environment, _NEEDED + _NEEDED_TO_ACT)
    else:
        _check_members(function, "a task", task, Task, _NEEDED)
    own: object = getattr(task, "tokenizer", None)
    tokenizer = check_tokenizer(function, own)
    members: dict[str, Any] = {} if tokenizer is own else {"tokenizer": tokenizer}
    if _member(task, "name") is _ABSENT:
        members["name"] = type(task).__name__
    if members or not isinstance(task, Environment if _acts(task) else Task):
        return changed(task, **members)
    return task


def check_tokenizer(function: str, tokenizer: object) -> Tokenizer:
    """Return an object as a `Tokenizer`; raise if it is none."""
    _check_members(function, "a tokenizer", tokenizer, Tokenizer, _NEEDED_OF_TOKENIZER)
    return tokenizer if isinstance(tokenizer, Tokenizer) else TokenizerStandIn(tokenizer)


def changed(task: object, **members: Any) -> Task:
    """Return a task that has the given members, and all others of `task`."""
    return (_EnvironmentStandIn if _acts(task) else _TaskStandIn)(task, **members)


def _acts(task: object) -> bool:
    return isinstance(task, Environment) or hasattr(task, "act")


class _StandIn:
    """Has the members that it is given, else those of an object, else its class's defaults."""

    def __init__(self, inner: object, **members: Any) -> None:
        self._inner = inner
        vars(self).update(members)

    def __getattribute__(self, name: str) -> Any:
        own = super().__getattribute__
        if name.startswith("_") or name in own("__dict__"):
            return own(name)
        found = _member(own("_inner"), name)
        return own(name) if found is _ABSENT else found

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_") or name in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self._inner, name, value)

    def __repr__(self) -> str:
        return repr(self._inner)


class TokenizerStandIn(_StandIn, Tokenizer):
    """A `Tokenizer` with the members of another object."""


class _TaskStandIn(_StandIn, Task):
    """A `Task` with the members of another object."""


class _EnvironmentStandIn(_StandIn, Environment):
    """An `Environment` with the members of another object."""


def _member(value: object, name: str) -> Any:
    """Return a member; `_ABSENT` where there is none, but not where one raises AttributeError."""
    try:
        return getattr(value, name)
    except AttributeError:
        if inspect.getattr_static(value, name, _ABSENT) is not _ABSENT:
            raise
        return _ABSENT


def _check_members(
    function: str, words: str, value: object, kind: type, needed: tuple[str, ...]
) -> None:
    """Raise for a member that the value lacks, or has only as the base class's placeholder."""
    for name in needed:
        found = _member(value, name)
        placeholder = getattr(kind, name, _ABSENT)
        has_none = found is None and name not in _MAY_BE_NONE
        if has_none or getattr(found, "__func__", found) in (_ABSENT, placeholder):
            raise ValueError(f"{function} expects {words} with {', '.join(needed)}, got no {name}.")


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
    columns of the task's data, or for a whole batch `prompts`, `completions`, columns and what
    TRL's functions get: `completion_ids`, `trainer_state`, `log_metric`, `log_extra`. It returns
    a number, or several by name; for a batch a list of them. It may be `async def`.

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
    **known: Any,
) -> list[Mapping[str, float] | BaseException]:
    """Return a task's own rewards of each completion, and the others, or the first error."""
    columns = columns_of(prompts[0])
    forms = {name: form_of(name, function, columns) for name, function in more.items()}
    own = own_calls(task, prompts, outcomes, limits, known)
    calls = [calls_of(forms[name], more[name], prompts, outcomes, known) for name in more]
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
