"""Frozen dataclasses to YAML and back, and which options differ between two of them."""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, NamedTuple, TypeVar

from funcrl.config.names import no_option, suggest
from funcrl.config.sections import is_own
from funcrl.config.training import TrainConfig
from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.core.files import brief, read_yaml

Config = TypeVar("Config")

_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?(([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?|inf)")


def to_plain(config: Any) -> dict[str, Any]:
    """Return a configuration as nested dictionaries of what YAML can write.

    Example:
        >>> from funcrl import config
        >>> config.to_plain(config.CheckpointConfig())
        {'every': 50, 'keep_last': 3, 'keep_best': 1}
    """
    return {part.name: _plain(getattr(config, part.name)) for part in dataclasses.fields(config)}


@checked
def from_plain(kind: type[Config], values: Mapping[str, Any], path: str = "") -> Config:
    """Return the configuration of nested dictionaries; what they leave out has its default.

    Args:
        kind: a dataclass.
        values: option -> value.
        path: where `values` stand, for errors.

    Example:
        >>> from funcrl import config
        >>> config.from_plain(config.CheckpointConfig, {"every": 5}).every
        5
        >>> config.from_plain(config.CheckpointConfig, {"evry": 5})
        Traceback (most recent call last):
        ValueError: CheckpointConfig has no option 'evry'; did you mean 'every'?
    """
    hints = typing.get_type_hints(kind)
    wrong = {
        brief(path + str(name)): [repr(path + each) for each in _meant(kind, str(name))]
        for name in values
        if name not in hints
    }
    if wrong:
        raise ValueError(no_option(kind.__name__, wrong))
    return kind(**{name: _typed(hints[name], values[name], path + name) for name in values})


def _meant(kind: Any, name: str) -> list[str]:
    """Return the options that a wrong name may mean, those of the configuration itself if any."""
    found = suggest(name.replace("_", "-"), [*_names_of(kind)])
    return [each.replace("-", "_") for each in found if "." not in each or "." in found[0]]


def _names_of(kind: Any, prefix: str = "") -> Iterator[str]:
    """Yield the options of a configuration and of those inside it, as the command line has them."""
    for name, hint in typing.get_type_hints(kind).items():
        option = prefix + name.replace("_", "-")
        inner = section_of(hint)
        yield from [option] if inner is None else _names_of(inner, f"{option}.")


def section_of(hint: Any) -> Any:
    """Return the dataclass that the type of an option is, or may be; None if it is none."""
    return next((each for each in (hint, *typing.get_args(hint)) if is_dataclass(each)), None)


@checked
def read_config(kind: type[Config], path: str | Path) -> Config:
    """Return the configuration that a YAML file holds.

    Args:
        kind: a dataclass.
        path: of the file.

    Example:
        >>> import pathlib
        >>> from funcrl.config import TrainConfig, read_config
        >>> read_config(TrainConfig, pathlib.Path("no.yaml"))
        Traceback (most recent call last):
        FileNotFoundError: train expects a configuration at no.yaml, got no such file.
    """
    path = Path(path)
    if not path.exists():
        raise FileNotFoundError(f"train expects a configuration at {path}, got no such file.")
    values = read_yaml("train", path)
    if not isinstance(values, dict | None):
        raise ValueError(f"train expects options in {path}, got {type(values).__name__}.")
    try:
        return from_plain(kind, values or {})
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"train expects options that it knows in {path}, got: {str(error)[:500]}"
        ) from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _typed(hint: Any, value: Any, path: str) -> Any:
    """Return a value read from YAML as the type of its option, or say what was expected."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return from_plain(hint, value, f"{path}.")
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        kinds = [kind for kind in arguments if kind is not type(None)]
        words = [kind for kind in kinds if typing.get_origin(kind) is Literal]  # such as "all"
        chosen = next((kind for kind in words if value in typing.get_args(kind)), kinds[0])
        return _typed(chosen, value, path)
    if origin is Literal:
        checks.check_choice("train", path, value, arguments)
        return value
    if origin is tuple and isinstance(value, list):
        return tuple(_typed(arguments[0], part, path) for part in value)
    if origin is dict and isinstance(value, Mapping):
        return {str(name): _typed(arguments[1], part, path) for name, part in value.items()}
    if hint is Path and isinstance(value, str):
        return Path(value)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is float and isinstance(value, str):
        return _number(value, path)  # YAML reads 1e-6 as a string
    if not (isinstance(hint, type) and type(value) is hint):
        name = getattr(hint, "__name__", str(hint))
        raise ValueError(f"train expects {path} to be of type {name}, got {brief(value)}.")
    return value


def read_integer(text: str) -> int:
    """Return the integer that a text writes in the digits 0 to 9; Python's own reads others too."""
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"expects an integer in the digits 0 to 9, got {brief(text)}.")
    if len(text) > 20 or not -(2**63) <= int(text) < 2**63:
        raise ValueError(f"expects an integer of 64 bits, got {brief(text)}.")
    return int(text)


def read_number(text: str) -> float:
    """Return the number that a text writes in the digits 0 to 9, or `inf`."""
    if not _NUMBER.fullmatch(text):
        raise ValueError(f"expects a number in the digits 0 to 9, got {brief(text)}.")
    if math.isinf(float(text)) and "inf" not in text:
        raise ValueError(f"expects a number that float64 holds, got {brief(text)}.")
    return float(text)


def _number(text: str, path: str) -> float:
    try:
        return read_number(text)
    except ValueError:
        raise ValueError(f"train expects {path} to be a number, got {text!r}.") from None


# What a resumed run may change: an option, or a group of them. All others say what is trained, and
# with what; a run keeps them, so that its configuration is true of every step.
MAY_CHANGE = (
    "steps", "stop-at",  # how long; a schedule that ends with the run is stretched
    "evaluation", "checkpoint", "log",  # what is measured, kept and written down
    "on-reward-error", "reward-timeout",  # what a reward that fails does to the run
    # How it is computed: the same mathematics at another speed, rounded otherwise.
    "device", "numerics", "threads", "microbatch", "logprob-chunk", "slots",
    "length-multiple", "packing", "pack-length", "pack-rows", "attend", "compile",
    "reward-concurrency", "ranks", "shard",
    # What draws: its log-probabilities are recorded with each sample.
    "generator", "vllm",
)  # fmt: skip
# Names of files whose checksums a run compares: the same file in another folder is no change.
_FILES = ("task", "model", "reward", "algorithm.name", "optimizer.name")


class Change(NamedTuple):
    """An option that has another value."""

    option: str  # as on the command line, without the dashes
    before: Any
    after: Any

    @property
    def is_allowed(self) -> bool:
        """Whether a resumed run may change it."""
        return any(f"{self.option}.".startswith(f"{name}.") for name in MAY_CHANGE)


@checked
def changed_options(before: TrainConfig, after: TrainConfig) -> list[Change]:
    """Return the options that two configurations of a run differ in, but for where it lies.

    Args:
        before: a configuration.
        after: another one.

    Example:
        >>> from funcrl.config import TrainConfig, changed_options
        >>> [change] = changed_options(TrainConfig(), TrainConfig(seed=1))
        >>> change, change.is_allowed
        (Change(option='seed', before=0, after=1), False)
    """
    return [each for each in _differences(before, after, "") if each.option != "run-dir"]


def _differences(before: Any, after: Any, prefix: str) -> Iterator[Change]:
    for field in fields(before):
        name = prefix + field.name.replace("_", "-")
        old, new = getattr(before, field.name), getattr(after, field.name)
        if is_dataclass(old) and is_dataclass(new):
            yield from _differences(old, new, f"{name}.")
        elif old != new and not (name in _FILES and _same_file(name, old, new)):
            yield Change(name, _plain_value(old), _plain_value(new))


def _same_file(option: str, old: Any, new: Any) -> bool:
    """Return whether two names are those of one file that has moved."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        return all(a == b or _same_file(option, a, b) for a, b in zip(old, new, strict=True))
    if not (isinstance(old, str) and isinstance(new, str)):
        return False
    if option == "model" and not (is_own(old) and is_own(new)):  # weights, or a run
        return False
    return PurePath(old).name == PurePath(new).name and ("/" in old + new)


def _plain_value(value: Any) -> Any:
    if is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
