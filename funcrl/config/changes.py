"""Which options differ between two configurations, and which a run may change on its way."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from funcrl.config.plain import to_plain
from funcrl.config.sections import is_own
from funcrl.config.training import TrainConfig
from funcrl.core.arguments import checked

# What a resumed run may change: an option, or a group of them. All others say what is trained, and
# with what; a run keeps them, so that its configuration is true of every step.
MAY_CHANGE = (
    "steps",  # how long; a schedule that ends with the run is stretched
    "evaluation", "checkpoint", "log",  # what is measured, kept and written down
    "on-reward-error", "reward-timeout",  # what a reward that fails does to the run
    # How it is computed: the same mathematics at another speed, rounded otherwise.
    "device", "numerics", "threads", "microbatch", "logprob-chunk", "slots",
    "length-multiple", "packing", "pack-length", "pack-rows", "attend", "compile",
    "reward-concurrency",
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
            yield Change(name, _plain(old), _plain(new))


def _same_file(option: str, old: Any, new: Any) -> bool:
    """Return whether two names are those of one file that has moved."""
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        return all(a == b or _same_file(option, a, b) for a, b in zip(old, new, strict=True))
    if not (isinstance(old, str) and isinstance(new, str)):
        return False
    if option == "model" and not (is_own(old) and is_own(new)):  # weights, or a run
        return False
    return PurePath(old).name == PurePath(new).name and ("/" in old + new)


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_plain(value)
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
