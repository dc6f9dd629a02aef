"""Calls a user's task, and undoes what the call changed in the process."""

import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from funcrl.core.launch import ForkedError
from funcrl.core.reading import brief
from funcrl.tasks.adapt import TokenizerStandIn, changed
from funcrl.tasks.contracts import Environment, Prompt, Task, Tokenizer
from funcrl.tasks.rewards.calls import RewardLimits, run_calls
from funcrl.tasks.rewards.own import call_batch, has_own_batch

Note: TypeAlias = Callable[[str], None]

_METHODS = ("prompts", "eval_prompts", "reward", "demonstrate", "extract")
_METHODS_TO_ACT = ("begin", "act", "observe")
_METHODS_OF_TOKENIZER = ("encode", "decode", "encode_answer", "encode_reply")
_SMALLEST_NORMAL = sys.float_info.min
_CPU: Any = torch.backends.mkldnn  # its stubs lack `matmul`
# What `torch.set_float32_matmul_precision` makes of the backends of CUDA and of the CPU.
_PRECISIONS = {("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}


class TaskError(ValueError):
    """A task that called `sys.exit`, whose tokenizer raised, or whose prompts have no text."""


def watch(task: Task, note: Note) -> Task:
    """Return the task with methods that leave the process as it was.

    Settings that change how numbers are computed are put back after each call. `sys.exit`, a
    tokenizer that raises and prompts without a text become a `TaskError`, and a forked child that
    returns is stopped by a `ForkedError`.

    Args:
        task: any task or environment.
        note: is called with a line of text when a setting has been changed for the first time.
    """
    watcher = _Watcher(task, note)
    methods = _METHODS + (_METHODS_TO_ACT if isinstance(task, Environment) else ())
    tokenizer = TokenizerStandIn(
        task.tokenizer,
        **{name: partial(watcher.call_tokenizer, name) for name in _METHODS_OF_TOKENIZER},
    )
    watched = {name: partial(watcher.call, task, name) for name in methods}
    watched |= {name: partial(watcher.call_prompts, name) for name in ("prompts", "eval_prompts")}
    # Each reward is watched, and all of them together: those that are `async def` end later.
    batch = partial(_batch, task) if has_own_batch(task) else partial(_each, watched["reward"])
    watched["reward_batch"] = partial(watcher.run, "reward", batch)
    return changed(task, tokenizer=tokenizer, **watched)


def _batch(
    task: Task, prompts: Sequence[Prompt], outcomes: Sequence[Any], limits: RewardLimits
) -> Any:
    """Return the rewards of a batch, waited for if they come later; the error if it raised one."""
    return run_calls([partial(call_batch, task, prompts, outcomes, limits)], limits)[0]


def _each(
    reward: Callable[..., Any], prompts: Sequence[Prompt], outcomes: Sequence[Any],
    limits: RewardLimits,
) -> list[Any]:  # fmt: skip
    pairs = zip(prompts, outcomes, strict=True)
    return run_calls([partial(reward, *pair) for pair in pairs], limits)


def settings() -> dict[str, Any]:
    """Return the settings of the process that change how numbers are computed.

    Each is under the name of the function that changes it.
    """
    return {name: read() for name, (read, _) in _SETTINGS.items()}


class _Watcher:
    """Calls the methods of a task and of its tokenizer."""

    def __init__(self, task: Task, note: Note) -> None:
        self._task, self._note, self._noted = task, note, set[str]()

    def call(self, owner: Task | Tokenizer, method: str, *args: Any, **named: Any) -> Any:
        """Return what a method of the task or of its tokenizer returns."""
        label = f"tokenizer.{method}" if isinstance(owner, Tokenizer) else method
        return self.run(label, getattr(owner, method), *args, **named)

    def run(self, label: str, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Return what a function returns, which errors and notes call `label`."""
        process, before = os.getpid(), settings()
        name = self._task.name
        try:
            return function(*args, **named)
        except SystemExit as error:
            raise TaskError(
                f"The task {name!r} called sys.exit({error.code!r}) in {label}"
            ) from error
        finally:
            if os.getpid() != process:
                raise ForkedError(
                    f"The task {name!r} forked a child in {label} that returned from there; "
                    f"a child must end by os._exit. The run goes on in its own process {process}, "
                    f"and not in this child {os.getpid()}."
                )
            self._put_back(label, before)

    def call_prompts(self, method: str, *args: Any, **named: Any) -> Any:
        """Return the prompts that a method of the task returns; raise if they have no text."""
        found = self.call(self._task, method, *args, **named)
        if found is None and method == "eval_prompts":
            return ()
        listed = found if hasattr(found, "__len__") else [found]
        wrong = [each for each in listed if not hasattr(each, "text")]
        if wrong:
            raise TaskError(
                f"{method}() of the task {self._task.name!r} is expected to return a list of "
                f"funcrl.tasks.Prompt(text, answer), got {brief(wrong[0])}."
            )
        return found

    def call_tokenizer(self, method: str, *args: Any, **named: Any) -> Any:
        """Return what a method of the tokenizer returns; whatever it raises names the task."""
        try:
            return self.call(self._task.tokenizer, method, *args, **named)
        except Exception as error:
            given = ", ".join(repr(each)[:80] for each in (*args, *named.values()))
            raise TaskError(
                f"The tokenizer of the task {self._task.name!r} raised {type(error).__name__}: "
                f"{error} from {method}({given})."
            ) from error

    def _put_back(self, method: str, before: dict[str, Any]) -> None:
        after = settings()
        for name in [name for name in before if after[name] != before[name]]:
            _SETTINGS[name][1](before[name])
            if name not in self._noted:
                self._noted.add(name)
                self._note(
                    f"The task {self._task.name!r} changed {name} from {before[name]} to "
                    f"{after[name]} in {method}; each such change is undone."
                )


def _flushes_denormal() -> bool:
    """Return whether numbers below the smallest normal one become zero in this thread."""
    return _SMALLEST_NORMAL / 2 == 0.0


def _deterministic() -> tuple[bool, bool]:
    return (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _set_default_device(device: torch.device) -> None:
    torch.set_default_device(None if device.type == "cpu" else device)


def _matmul_precision() -> tuple[str, str]:
    return torch.backends.cuda.matmul.fp32_precision, _CPU.matmul.fp32_precision


def _set_matmul_precision(value: tuple[str, str]) -> None:
    # torch keeps an older setting beside the backends' own, and refuses two that disagree.
    torch.set_float32_matmul_precision(_PRECISIONS.get(value, "highest"))
    torch.backends.cuda.matmul.fp32_precision, _CPU.matmul.fp32_precision = value


# The function that changes a setting -> how it is read and put back.
_SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]] = {
    "torch.set_default_device": (torch.get_default_device, _set_default_device),
    "torch.set_default_dtype": (torch.get_default_dtype, torch.set_default_dtype),
    "torch.set_float32_matmul_precision": (_matmul_precision, _set_matmul_precision),
    "torch.set_flush_denormal": (_flushes_denormal, torch.set_flush_denormal),
    "torch.set_grad_enabled": (torch.is_grad_enabled, torch.set_grad_enabled),
    "torch.set_num_threads": (torch.get_num_threads, torch.set_num_threads),
    "torch.use_deterministic_algorithms": (_deterministic, _set_deterministic),
}
