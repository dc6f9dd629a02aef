"""The functions that a module shows."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any


def functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions that a module, or one in it, defines and that it does not hide, by name."""
    return {
        name: value
        for name, value in vars(module).items()
        if inspect.isfunction(value)
        and value.__module__.startswith(module.__name__)  # and not only imported there
        and not name.startswith("_")
    }
