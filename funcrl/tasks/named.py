"""Finds and imports what a user names as file.py:Name or module:Name: a task, a model, a reward."""

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from funcrl.config.names import did_you_mean, own_name
from funcrl.config.sections import is_own
from funcrl.core.files import brief


def named_file(option: str, name: str) -> Path:
    """Return the file that `import_named` would run for a name; nothing is run.

    A module that has no file is returned by its name.
    """
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return _existing_file(option, name, place).resolve()
    return _module_file(place) or Path(f"the module {place}")


def check_name(option: str, name: str) -> None:
    """Raise unless `import_named` can look for the object of a name; nothing is run."""
    if not is_own(name):
        meant = [own_name(name)] if is_own(own_name(name)) else []
        if option == "--reward" and "/" in name and not name.endswith(".py"):
            meant = [f"--reward-model {name}"]
        raise ValueError(
            f"load expects {option} to be file.py:Name or module:Name, got {brief(name)}"
            f"{did_you_mean(meant)}"
        )


def import_named(option: str, name: str) -> Any:
    """Return the object of a name, whose file or module is run."""
    check_name(option, name)  # of such names alone it is asked whether this account trusts the file
    place, _, attribute = name.rpartition(":")
    module = _module(option, name, place)
    if not hasattr(module, attribute):
        raise ValueError(f"load expects {option} {name} to name an object, got none in {place}.")
    return getattr(module, attribute)


def call_with_known(
    option: str, name: str, function: Any, unset: Mapping[str, str] | None = None, /, **known: Any
) -> Any:
    """Return what a user's function returns for those of the known arguments that it takes."""
    if not callable(function):
        raise ValueError(
            f"train expects {option} {name} to name a function or a class, got "
            f"{type(function).__name__}."
        )
    options = unset or {}
    unknown = [each for each in needed_arguments(function) if each not in known]
    if unknown and unknown[0] in options:
        raise ValueError(
            f"train expects {options[unknown[0]]} for {name}, which needs {unknown[0]}, got none."
        )
    if unknown:
        raise ValueError(
            f"train expects {option} {name} to take no other arguments than "
            f"{', '.join([*known, *options])}, got one that needs {unknown[0]}."
        )
    return function(**{each: known[each] for each in arguments_taken(function, known)})


def needed_arguments(function: Any) -> list[str]:
    """Return the names of the arguments that a function must be given; none for another object."""
    if not callable(function):
        return []
    return [
        each.name
        for each in inspect.signature(function).parameters.values()
        if each.default is each.empty and each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)
    ]


def arguments_taken(function: Callable[..., Any], names: Any) -> list[str]:
    """Return the names that a function takes as keyword arguments."""
    taken = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in taken.values())
    return [name for name in names if takes_all or name in taken]


def _module(option: str, name: str, place: str) -> ModuleType:
    """Import a file, or a module, with its own folder in `sys.path` as Python would."""
    is_file = place.endswith(".py")
    path = _existing_file(option, name, place) if is_file else Path(place)
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _run_file(path) if is_file else importlib.import_module(place)
    except ImportError as error:
        raise ImportError(f"load could not import {option} {name}: {error}.") from error


def _run_file(path: Path) -> ModuleType:
    # Under a name of its own: a file random.py must not become everyone's `random`.
    spec = importlib.util.spec_from_file_location(f"funcrl_own_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickles look for it
    # Compile the file itself, and do not use what __pycache__ holds.
    exec(compile(path.read_bytes(), str(path), "exec"), module.__dict__)
    return module


def _existing_file(option: str, name: str, place: str) -> Path:
    path = Path(place)
    if not path.is_file():
        raise FileNotFoundError(f"load expects {option} {name} to name a file, got none at {path}.")
    return path


def _module_file(name: str) -> Path | None:
    """Return the file that importing a module would run, without importing what it lies in."""
    if name in sys.modules:
        file = getattr(sys.modules[name], "__file__", None)
        return None if file is None else Path(file).resolve()
    here, path, spec = str(Path.cwd()), list(sys.path), None
    if here not in path:
        path.insert(0, here)  # as `_module` does
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        spec = _spec(".".join(parts[:end]), path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    found = spec is not None and spec.has_location and spec.origin is not None
    return Path(str(spec.origin)).resolve() if spec is not None and found else None


def _spec(name: str, path: list[str]) -> ModuleSpec | None:
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path)
        if spec is not None:
            return spec
    return None
