"""Calls reward functions of several forms, of a user's own and those of a task."""

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, SupportsFloat

from funcrl.core.arguments import check_value
from funcrl.core.files import brief
from funcrl.tasks.contracts import Prompt, Task, ToolState
from funcrl.tasks.named import arguments_taken
from funcrl.tasks.reward_calls import (
    FunctionError,
    NoRewardError,
    RewardLimits,
    function_error,
    run_calls,
)


class TrainerState(NamedTuple):
    """How far a run is, for reward functions, under TRL's names."""

    global_step: int  # updates that are done
    max_steps: int


class RewardLog:
    """What reward functions log of a batch, by the two functions that they get, of TRL's names."""

    def __init__(self, count: int) -> None:
        self.metrics: dict[str, list[float]] = {}
        self.columns: dict[str, list[Any]] = {}  # each of [B]
        self._count = count

    def log_metric(self, name: str, value: SupportsFloat) -> None:
        """Log a number; of several with one name the mean is a metric."""
        check_value("log_metric", "name", str, name)
        if not isinstance(value, SupportsFloat):
            raise TypeError(f"log_metric expects a number as {name!r}, got {brief(value)}.")
        self.metrics.setdefault(name, []).append(float(value))

    def log_extra(self, column: str, values: Sequence[Any]) -> None:
        """Log a value of each completion."""
        check_value("log_extra", "column", str, column)
        listed = list(values)
        if len(listed) != self._count:
            raise ValueError(
                f"log_extra expects a value for each of {self._count} completions as "
                f"{column!r}, got {len(listed)}."
            )
        plain = (str, int, float, type(None))  # what a line of completions.jsonl can hold
        self.columns[column] = [v if isinstance(v, plain) else str(v) for v in listed]


class Conversation(dict[str, Any]):
    """The row of a prompt that is a list of messages."""

    def __init__(self, row: Mapping[str, Any], column: str) -> None:
        super().__init__(row)
        self.messages: list[Any] = list(row[column])


class Form(NamedTuple):
    """How a reward function is called."""

    kind: Literal["positional", "one", "batch"]
    names: tuple[str, ...] = ()  # of its keyword arguments
    needed: tuple[str, ...] = ()  # those without a default
    takes_all: bool = False  # whether it takes all columns besides


def form_of(name: str, function: Callable[..., Any], columns: Collection[str]) -> Form:
    """Return how a reward function is called, which its parameters say.

    One that takes `prompts`, `completions`, `completion_ids`, `log_extra`, `environments` or
    `solution_strs` is called once for a batch. Parameters that are called prompt, completion,
    answer, data, trainer_state, log_metric, or like a column get these, and so do verl's
    solution_str and ground_truth. Of two others the names must say that they are the prompt and the
    completion, as (p, c) and (_, text) do.
    """
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a function of C that does not say
        return Form("positional")
    kinds = {each.kind for each in parameters}
    takes_all = inspect.Parameter.VAR_KEYWORD in kinds
    plain = [
        each for each in parameters if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]
    names = [each.name for each in plain]
    needed = [each.name for each in plain if each.default is each.empty]
    is_batch = not _OF_BATCH.isdisjoint(names)
    is_batch |= not _OF_ANY.isdisjoint(names) and _OF_ONE.isdisjoint(names)
    known = {*columns, *(_BATCH | _plurals(columns) if is_batch else _ONE)}
    unknown = [each for each in needed if each not in known]
    by_position = {inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL} & kinds
    if (names or takes_all) and not unknown and not by_position:
        taken = tuple(n for n in names if n in known)
        return Form("batch" if is_batch else "one", taken, tuple(needed), takes_all)
    if not is_batch and ((by_position and len(needed) <= 2) or _is_pair(needed, known)):
        return Form("positional")
    raise ValueError(
        f"The reward {name!r} is expected to take what there is ({', '.join(sorted(known))}), got "
        f"a function with {', '.join(map(repr, unknown)) or 'no arguments'}; f(prompt, completion) "
        f"takes any prompt and its completion."
    )


def calls_of(
    form: Form,
    function: Callable[..., Any],
    prompts: Sequence[Any],
    outcomes: Sequence[Any],
    known: Mapping[str, Any],
) -> list[Callable[[], Any]]:
    """Return the calls that reward completions: one for each, or a single one for all.

    Args:
        form: of the function.
        function: any callable.
        prompts: [B] the prompts, as `funcrl.tasks.Prompt`.
        outcomes: [B] the texts of completions, or an environment's last states.
        known: what else functions may take, by name.
    """
    if form.kind == "batch":
        return [partial(_call_batch, function, form, prompts, outcomes, known)]
    if form.kind == "positional":
        return [partial(function, *row) for row in zip(prompts, outcomes, strict=True)]
    return [
        partial(_call_one, function, form, prompt, outcome, known)
        for prompt, outcome in zip(prompts, outcomes, strict=True)
    ]


def rewards_of_calls(
    name: str, form: Form, results: Sequence[Any], count: int
) -> list[Mapping[str, Any] | FunctionError]:
    """Return the named rewards of each completion, from what the calls of a function returned."""
    if form.kind == "batch":
        (result,) = results
        results = as_list(result, count)
    is_verls = not _OF_VERL.isdisjoint(form.names)
    return [
        function_error(name, each)
        if isinstance(each, BaseException)
        # Beside the score, verl's functions may return numbers to look at.
        else named(name, each["score"] if is_verls and _has_score(each) else each)
        for each in results
    ]


def _has_score(value: Any) -> bool:
    return isinstance(value, Mapping) and "score" in value


def named(name: str, value: Any) -> Mapping[str, Any]:
    """Return what a reward function returned as named rewards: a number gets the name."""
    return value if isinstance(value, Mapping) else {name: value}


def as_list(result: Any, count: int) -> Sequence[Any]:
    """Return the values of a batch, one for each completion; each the error if it is one."""
    if isinstance(result, BaseException):
        return [result] * count
    is_list = hasattr(result, "__len__") and hasattr(result, "__iter__")
    if is_list and not isinstance(result, str | bytes | Mapping) and len(result) == count:
        return list(result)
    found = f"{len(result)}" if is_list else brief(result)
    error = NoRewardError(f"gave {found} for a batch of {count} completions, not {count} numbers")
    return [error] * count


_TEXTS = {"text", "response", "output", "outcome", "reply", "generation"}  # of a completion
_VERL = {"solution_str", "ground_truth"}  # verl's names for the completion and the answer
_OF_ANY = {"trainer_state", "log_metric"}  # of a function of one completion or of a batch
_OF_ONE = {"prompt", "completion", "state", "solution_str"}
_ONE = {*_OF_ONE, "answer", "data", *_VERL, *_OF_ANY}
_PLURALS = {f"{each}s" for each in _VERL}
_OF_BATCH = {
    "prompts", "completions", "completion_ids", "log_extra", "environments", "solution_strs",
}  # fmt: skip
_BATCH = {*_OF_BATCH, "states", "answers", "data", *_PLURALS, *_OF_ANY}
_KNOWN = {"completion_ids", "log_extra", *_OF_ANY}  # where there are any
_OF_VERL = {"solution_str", "solution_strs"}
# Where a column has one of these names, the argument is not the column; `data` has it.
_RESERVED = {"prompt", "completion", "solution_str", *_OF_BATCH, *_OF_ANY}


def columns_of(prompt: Any) -> Mapping[str, Any]:
    """Return the row that a prompt was made of, by column; empty if there is none."""
    return prompt.data if isinstance(prompt.data, Mapping) else {}


def _is_pair(needed: Sequence[str], known: Collection[str]) -> bool:
    """Return whether two arguments are by their names the prompt and the completion."""
    if len(needed) != 2:
        return False
    first, second = needed
    is_prompt = first == "prompt" or (first not in known and _stands_for(first, "prompt"))
    is_text = second in _TEXTS or _stands_for(second, "completion")
    return is_prompt and is_text and second not in known


def _stands_for(name: str, word: str) -> bool:
    return word.startswith(name) or name.startswith("_")


def _ground_truth(prompt: Any) -> Any:
    """Return the answer, from where verl's data have it if they do."""
    columns = columns_of(prompt)
    of_verl = columns.get("reward_model")
    nested = of_verl.get("ground_truth") if isinstance(of_verl, Mapping) else None
    return columns.get("ground_truth", prompt.answer if nested is None else nested)


def _as_given(prompt: Any) -> Any:
    """Return the messages of a conversation, as TRL's functions get them; else the text."""
    return prompt.data.messages if isinstance(prompt.data, Conversation) else prompt.text


def _reply(prompt: Any, outcome: Any) -> Any:
    """Return the message that goes on with a conversation, in a list; else the text."""
    if isinstance(outcome, ToolState):
        return list(outcome.messages)
    if isinstance(prompt.data, Conversation) and isinstance(outcome, str):
        return [{"role": "assistant", "content": outcome}]
    return outcome


def _environment(outcome: Any) -> Any:
    """Return the object that a policy's calls changed; of another environment the last state."""
    return outcome.environment if isinstance(outcome, ToolState) else outcome


def _plurals(columns: Collection[str]) -> set[str]:
    return {f"{each}s" for each in columns}


def _call_one(
    function: Callable[..., Any], form: Form, prompt: Any, outcome: Any, known: Mapping[str, Any]
) -> Any:
    _check_known(form, known)
    given = {
        "prompt": prompt, "completion": outcome, "state": outcome, "answer": prompt.answer,
        "data": prompt.data,
    }  # fmt: skip
    given |= {name: v for name, v in columns_of(prompt).items() if name not in _RESERVED}
    wanted = [*form.names, *(given if form.takes_all else ())]
    given = {"solution_str": outcome, "ground_truth": _ground_truth(prompt), **given, **known}
    return function(**{each: given[each] for each in wanted if each in given})


def _check_known(form: Form, known: Mapping[str, Any]) -> None:
    """Raise if a function needs what is not known."""
    missing = [each for each in form.needed if each in _KNOWN and each not in known]
    if missing:
        raise NoRewardError(f"takes {missing[0]}, got none: grade(..., {missing[0]}=...)")


def _call_batch(
    function: Callable[..., Any],
    form: Form,
    prompts: Sequence[Any],
    outcomes: Sequence[Any],
    known: Mapping[str, Any],
) -> Any:
    _check_known(form, known)
    names = [each for each in columns_of(prompts[0]) if each not in _RESERVED]
    columns = {name: [columns_of(each)[name] for each in prompts] for name in names}
    plain = {
        "prompts": [_as_given(each) for each in prompts],
        "completions": [_reply(*pair) for pair in zip(prompts, outcomes, strict=True)],
        "environments": [_environment(each) for each in outcomes],
        "states": list(outcomes),
        "answers": [each.answer for each in prompts],
        "data": [each.data for each in prompts],
        "solution_strs": list(outcomes),
        "ground_truths": [_ground_truth(each) for each in prompts],
    }
    plurals = {f"{name}s": v for name, v in columns.items() if f"{name}s" not in _RESERVED}
    given = {**plain, **plurals, **columns, **known}
    # As TRL does it: the prompts, the completions, what is known and every column by its own name.
    acts = ("environments",) if isinstance(outcomes[0], ToolState) else ()
    every = ("prompts", "completions", *known, *acts, *columns) if form.takes_all else ()
    taken = [each for each in (*form.names, *every) if each in given]
    return function(**{each: given[each] for each in taken})


def rewards_of(
    task: Task,
    prompts: Sequence[Prompt],
    outcomes: Sequence[Any],
    limits: RewardLimits,
    known: Mapping[str, Any],
) -> list[Mapping[str, Any] | BaseException]:
    """Return the named rewards of each completion, or the exception that was raised for it.

    Args:
        task: whose rewards.
        prompts: [B], at least one.
        outcomes: [B] the texts of completions, or an environment's last states.
        limits: of rewards that are `async def`.
        known: what else functions may take, by name.
    """
    calls = own_calls(task, prompts, outcomes, limits, known)
    return own_rewards(task, run_calls(calls, limits), len(prompts))


def own_calls(
    task: Task,
    prompts: Sequence[Prompt],
    outcomes: Sequence[Any],
    limits: RewardLimits,
    known: Mapping[str, Any],
) -> list[Callable[[], Any]]:
    """Return the calls of a task's `reward`, or one of its `reward_batch` if it has its own."""
    if has_own_batch(task):
        return [partial(call_batch, task, prompts, outcomes, {"limits": limits, **known})]
    reward = task.reward  # looked up once: that of a stand-in takes as long as a short reward
    return [partial(reward, *pair) for pair in zip(prompts, outcomes, strict=True)]


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
    task: Task, prompts: Sequence[Prompt], outcomes: Sequence[Any], more: Mapping[str, Any]
) -> Any:
    """Return what a task's `reward_batch` returns, called with what it takes of `more`."""
    taken = arguments_taken(task.reward_batch, more)
    return task.reward_batch(prompts, outcomes, **{name: more[name] for name in taken})
