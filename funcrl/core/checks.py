"""Checks of arguments: each raises `f"{function} expects {what}, got {value}."` before any work.

They read shapes, dtypes and Python numbers, never a tensor's values, so that they also run while
a function is traced, vmapped or compiled. Bounds that do not depend on other arguments are in an
argument's annotation instead (`funcrl.core.arguments`).
"""

import importlib
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

from funcrl.core.arguments import checked, is_integer, is_number


@checked
def check_tensor(function: str, name: str, value: Any) -> None:
    """Raise unless `value` is a tensor.

    Example:
        >>> from funcrl import checks
        >>> checks.check_tensor("center", "rewards", [1.0])
        Traceback (most recent call last):
        TypeError: center expects rewards to be a tensor, got list.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{function} expects {name} to be a tensor, got {type(value).__name__}.")


@checked
def check_rank(function: str, name: str, value: Any, axes: str) -> None:
    """Raise unless `value` is a tensor with one dimension for each letter of `axes`.

    Example:
        >>> import torch
        >>> from funcrl import checks
        >>> checks.check_rank("collate", "tokens", torch.zeros(3), "BT")
        Traceback (most recent call last):
        ValueError: collate expects tokens of shape [B, T], got [3].
    """
    check_tensor(function, name, value)
    if value.ndim != len(axes):
        raise ValueError(
            f"{function} expects {name} of shape [{', '.join(axes)}], got {list(value.shape)}."
        )


@checked
def check_shape(function: str, name: str, value: Any, like: str, shape: torch.Size) -> None:
    """Raise unless `value` is a tensor of `shape`, the shape of the argument `like`.

    Example:
        >>> import torch
        >>> from funcrl import checks
        >>> checks.check_shape("collate", "mask", torch.zeros(3), "tokens", torch.Size([2, 3]))
        Traceback (most recent call last):
        ValueError: collate expects mask of the shape of tokens, [2, 3], got [3].
    """
    check_tensor(function, name, value)
    if value.shape != shape:
        raise ValueError(
            f"{function} expects {name} of the shape of {like}, {list(shape)}, "
            f"got {list(value.shape)}."
        )


@checked
def check_dtype(function: str, name: str, value: Any, dtype: torch.dtype) -> None:
    """Raise unless `value` has `dtype`.

    Example:
        >>> import torch
        >>> from funcrl import checks
        >>> checks.check_dtype("token_mean", "mask", torch.zeros(1, 3), torch.bool)
        Traceback (most recent call last):
        TypeError: token_mean expects mask of torch.bool, got torch.float32.
    """
    check_tensor(function, name, value)
    if value.dtype != dtype:
        raise TypeError(f"{function} expects {name} of {dtype}, got {value.dtype}.")


@checked
def check_floating(function: str, name: str, value: Any) -> None:
    """Raise unless `value` has a floating-point dtype.

    Example:
        >>> import torch
        >>> from funcrl import checks
        >>> checks.check_floating("center", "rewards", torch.tensor([1, 2]))
        Traceback (most recent call last):
        TypeError: center expects rewards of a floating-point dtype, got torch.int64.
    """
    check_tensor(function, name, value)
    if not value.is_floating_point():
        raise TypeError(f"{function} expects {name} of a floating-point dtype, got {value.dtype}.")


@checked
def check_count(function: str, name: str, value: Any) -> None:
    """Raise unless `value` is an integer above 0.

    Example:
        >>> from funcrl import checks
        >>> checks.check_count("grpo_step", "microbatch", 2.5)
        Traceback (most recent call last):
        ValueError: grpo_step expects microbatch to be an integer above 0, got 2.5.
    """
    if not is_integer(value) or value < 1:
        raise ValueError(f"{function} expects {name} to be an integer above 0, got {value!r}.")


@checked
def import_extra(function: str, module: str, why: str, install: str) -> Any:
    """Return an optional dependency; if it is missing, the error says how to install it.

    Example:
        >>> from funcrl import checks
        >>> checks.import_extra("load", "no_such_module", "for this task", "such")
        Traceback (most recent call last):
        ModuleNotFoundError: load expects no_such_module to be installed for this task: \
pip install such.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ModuleNotFoundError(
            f"{function} expects {module.partition('.')[0]} to be installed {why}: "
            f"pip install {install}."
        ) from error


@checked
def check_callable(function: str, name: str, value: Any, kind: str) -> None:
    """Raise unless `value` can be called; `kind` says what it should be.

    Example:
        >>> from funcrl import checks
        >>> checks.check_callable("grpo", "correction", 3.0, "a function like truncated(3.0)")
        Traceback (most recent call last):
        TypeError: grpo expects correction to be a function like truncated(3.0), got 3.0.
    """
    if not callable(value):
        raise TypeError(f"{function} expects {name} to be {kind}, got {value!r}.")


@checked
def check_range(function: str, name: str, value: Any, low: float, high: float) -> None:
    """Raise unless `low <= value <= high`.

    Example:
        >>> from funcrl import checks
        >>> checks.check_range("top_entropy", "fraction", 1.5, 0.0, 1.0)
        Traceback (most recent call last):
        ValueError: top_entropy expects 0.0 <= fraction <= 1.0, got 1.5.
    """
    if not is_number(value):
        raise TypeError(f"{function} expects {name} to be a number, got {value!r}.")
    if not low <= value <= high:
        raise ValueError(f"{function} expects {low} <= {name} <= {high}, got {value}.")


@checked
def check_choice(function: str, name: str, value: Any, choices: Collection[Any]) -> None:
    """Raise unless `value` is one of `choices`.

    Example:
        >>> from funcrl import checks
        >>> checks.check_choice("grpo", "level", "word", ("token", "sequence"))
        Traceback (most recent call last):
        ValueError: grpo expects level to be one of 'token', 'sequence', got 'word'.
    """
    # `in` would compare a tensor element by element, and find True equal to 1.
    if not any(type(value) is type(choice) and value == choice for choice in choices):
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{function} expects {name} to be one of {listed}, got {value!r}.")
