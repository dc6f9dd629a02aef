"""From the name that a user types to a task."""

import importlib
import importlib.util
import sys
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
        raise ValueError(f"load expects a task with {', '.join(_NEEDED)}, got no {missing[0]}.")
    return task


def _module(name: str, place: str) -> ModuleType:
    """Import a file or a module as `python FILE` and `python -m MODULE` would: beside its own."""
    path = Path(place)
    is_file = place.endswith(".py")
    if is_file and not path.exists():
        raise FileNotFoundError(f"load expects --task {name} to name a file, got none at {path}.")
    folder = str(path.resolve().parent if is_file else Path.cwd())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        return _run_file(path) if is_file else importlib.import_module(place)
    except ImportError as error:
        raise ImportError(f"load could not import --task {name}: {error}.") from error


def _run_file(path: Path) -> ModuleType:
    # Under a name of its own: a task in random.py must not become everyone's `random`.
    spec = importlib.util.spec_from_file_location(f"funcrl_task_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses and pickles look for it
    spec.loader.exec_module(module)
    return module
