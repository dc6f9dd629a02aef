"""From the name that a user types to a task."""

import importlib
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from funcrl.protocols import Task
from funcrl.tasks.sum_digits import SumDigits

TASKS: dict[str, Callable[[], Task]] = {"sum_digits": SumDigits}

_NEEDED = ("name", "tokenizer", "prompts", "reward", "eval_prompts")


def load(name: str) -> Task:
    """Return the task of a name: a built-in one, or one's own as `file.py:Name` or `module:Name`.

    Example:
        >>> import funcrl
        >>> funcrl.tasks.load("sum_digits").prompts(seed=0, start=0, count=1)[0].text[-1]
        '='
    """
    place, colon, attribute = name.rpartition(":")
    if colon:
        module = _module(name, place)
        if not hasattr(module, attribute):
            raise ValueError(f"load expects --task {name} to name an object, got none in {place}.")
        task = getattr(module, attribute)
        task = task() if isinstance(task, type) or not hasattr(task, "reward") else task
    elif name in TASKS:
        task = TASKS[name]()
    else:
        known = ", ".join(TASKS)
        raise ValueError(
            f"load expects --task to be one of {known}, or your own as file.py:Name, got {name!r}."
        )
    missing = [part for part in _NEEDED if not hasattr(task, part)]
    if missing:
        raise TypeError(f"load expects a task with {', '.join(_NEEDED)}, got no {missing[0]}.")
    return task


def _module(name: str, place: str) -> ModuleType:
    if not place.endswith(".py"):
        return importlib.import_module(place)
    path = Path(place)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if not path.exists() or spec is None or spec.loader is None:
        raise FileNotFoundError(f"load expects --task {name} to name a file, got none at {path}.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
