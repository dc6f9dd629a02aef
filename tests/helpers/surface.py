"""What is public: the functions that the root of the package, or a module there, shows."""

import inspect
from collections.abc import Callable
from types import ModuleType
from typing import Any

import funcrl


def functions_of(module: ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions that a module, or one in it, defines and that it does not hide, by name.

    A module may say what it shows in `__all__`.
    """
    return {
        name: value
        for name, value in vars(module).items()
        if name in getattr(module, "__all__", vars(module))
        and inspect.isfunction(value)
        and value.__module__.startswith(module.__name__)  # and not only imported there
        and not name.startswith("_")
    }


def public_functions() -> dict[str, Callable[..., Any]]:
    """Each function that is an attribute of the root or of a module there, by its shortest name."""
    values = {name: getattr(funcrl, name) for name in funcrl.__all__}
    at_root = {name: value for name, value in values.items() if inspect.isfunction(value)}
    return at_root | {
        f"{prefix}.{name}": function
        for prefix, module in values.items()
        if inspect.ismodule(module)
        for name, function in functions_of(module).items()
        if function not in at_root.values()
    }


def public_names() -> set[str]:
    """The full name of everything public: of the root, its modules, and what these show.

    A module shows its `__all__`, or else the functions and classes that it defines.
    """
    modules = {
        name: value for name in funcrl.__all__ if inspect.ismodule(value := getattr(funcrl, name))
    }
    names = {f"funcrl.{name}" for name in funcrl.__all__}
    for prefix, module in modules.items():
        own = {
            name
            for name, value in vars(module).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        }
        shown = getattr(module, "__all__", own)
        names |= {f"funcrl.{prefix}.{name}" for name in shown}
    return names
