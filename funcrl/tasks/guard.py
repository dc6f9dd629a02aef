"""Calls the methods of a user's task and tokenizer; their wrongs become errors in words."""

from collections.abc import Callable
from functools import partial
from typing import Any

from funcrl.core.files import brief
from funcrl.tasks.adapt import TokenizerStandIn, changed
from funcrl.tasks.contracts import Environment, Task

_METHODS = ("demonstrate", "extract")
_METHODS_TO_ACT = ("begin", "act", "observe")
_METHODS_OF_TOKENIZER = ("encode", "decode", "encode_answer", "encode_reply")


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
