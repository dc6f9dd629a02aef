"""Calls into a user's task, which must leave the process as it was."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from funcrl.tasks.contracts import Environment, Task

Note: TypeAlias = Callable[[str], None]

_TASK = ("prompts", "eval_prompts", "reward", "begin", "act", "observe", "demonstrate", "extract")
_TOKENIZER = ("encode", "decode", "encode_answer", "encode_reply")
_SMALLEST_NORMAL = sys.float_info.min
_CPU: Any = torch.backends.mkldnn  # its stubs lack `matmul`
# What `torch.set_float32_matmul_precision` makes of the backends of CUDA and of the CPU.
_PRECISIONS = {("tf32", "tf32"): "high", ("tf32", "bf16"): "medium"}


class TaskError(ValueError):
    """A task that called `sys.exit`, or that raised in its tokenizer or in a demonstration."""


class ForkedError(BaseException):
    """A child process that a task forked and that went on with the run of its parent.

    It is no `Exception`, so that nothing that skips the errors of a reward can keep the child.
    """


def watch(task: Task | Environment, note: Note) -> Any:
    """Return the task, whose calls leave the process as it was.

    Settings that change how numbers are computed are put back after each call. `sys.exit` and a
    tokenizer that raises become a `TaskError`, and a forked child that returns is stopped by a
    `ForkedError`.

    Args:
        task: any task or environment.
        note: told the first time that a call has changed a setting.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.tasks.watch import watch
        >>> class Hasty(funcrl.tasks.SumDigits):
        ...     def reward(self, prompt, completion):
        ...         torch.set_default_dtype(torch.float64)
        ...         return super().reward(prompt, completion)
        >>> task = watch(Hasty(), note=print)
        >>> task.reward(funcrl.tasks.Prompt("1+2=", "3"), "3"), torch.get_default_dtype()
        The task 'sum_digits' changed torch.set_default_dtype from torch.float32 to torch.float64 \
in reward; each such change is undone.
        ({'correct': 1.0}, torch.float32)
    """
    return _WatchedTask(task, note)


def settings() -> dict[str, Any]:
    """Return the settings of the process that change how numbers are computed.

    Each is under the name of the function that changes it.

    Example:
        >>> from funcrl.tasks.watch import settings
        >>> settings()["torch.set_default_dtype"]
        torch.float32
    """
    return {name: read() for name, (read, _) in _SETTINGS.items()}


class _Watched:
    """An object of the user's, some of whose methods are watched."""

    def __init__(self, inner: Any, methods: tuple[str, ...], call: Callable[..., Any]) -> None:
        self._inner, self._methods, self._call = inner, methods, call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # while it is copied, it has nothing of its own yet
            raise AttributeError(name)
        found = getattr(self._inner, name)
        return partial(self._call, name, found) if name in self._methods else found


class _WatchedTask(_Watched):
    """A task whose methods, and whose tokenizer's, are watched."""

    def __init__(self, task: Task | Environment, note: Note) -> None:
        super().__init__(task, _TASK, self._call_task)
        self.tokenizer = _Watched(task.tokenizer, _TOKENIZER, self._call_tokenizer)
        self._note, self._noted = note, set[str]()

    def _call_task(
        self, method: str, function: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        process, before = os.getpid(), settings()
        try:
            return function(*args, **named)
        except SystemExit as error:
            raise TaskError(
                f"The task {self.name!r} called sys.exit({error.code!r}) in {method}"
            ) from error
        finally:
            if os.getpid() != process:
                raise ForkedError(
                    f"The task {self.name!r} forked a child in {method} that returned from there; "
                    f"a child must end by os._exit. The run goes on in its own process {process}, "
                    f"and not in this child {os.getpid()}."
                )
            self._put_back(method, before)

    def _call_tokenizer(
        self, method: str, function: Callable[..., Any], *args: Any, **named: Any
    ) -> Any:
        try:
            return self._call_task(f"tokenizer.{method}", function, *args, **named)
        except Exception as error:
            given = ", ".join(repr(each)[:80] for each in (*args, *named.values()))
            raise TaskError(
                f"The tokenizer of the task {self.name!r} raised {type(error).__name__}: {error} "
                f"from {method}({given})."
            ) from error

    def _put_back(self, method: str, before: dict[str, Any]) -> None:
        after = settings()
        for name in [name for name in before if after[name] != before[name]]:
            _SETTINGS[name][1](before[name])
            if name not in self._noted:
                self._noted.add(name)
                self._note(
                    f"The task {self.name!r} changed {name} from {before[name]} to {after[name]} "
                    f"in {method}; each such change is undone."
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
