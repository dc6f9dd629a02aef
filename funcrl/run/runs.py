"""Names, reads and writes the files in the folder of a run.

RUN/config.yaml         the resolved configuration
RUN/environment.json    machine, versions, command
RUN/metrics.jsonl       one JSON object a step
RUN/completions.jsonl   one JSON object a logged completion
RUN/changes.jsonl       one JSON object for each option that changed on the way, if any did
RUN/tokenizer/          the task's tokenizer, of a run whose model began from nothing
RUN/checkpoints/        what `funcrl.restore` reads
"""

import itertools
import json
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from funcrl.core.files import ENCODING, brief, open_file, parse_json, read_json, sync, whole_file

__all__ = [
    "CHANGES", "CHECKPOINTS", "COMPLETIONS", "CONFIG", "ENVIRONMENT", "METRICS", "Completion",
    "Row", "append_lines", "read_facts", "read_history", "read_lines",
]  # fmt: skip

Row: TypeAlias = Mapping[str, Any]  # a step's metrics

CONFIG = "config.yaml"  # the resolved configuration
ENVIRONMENT = "environment.json"  # machine, versions, command
METRICS = "metrics.jsonl"  # one JSON object a step
COMPLETIONS = "completions.jsonl"  # one JSON object a logged completion
CHANGES = "changes.jsonl"  # one JSON object for each option that changed on the way
CHECKPOINTS = "checkpoints"  # the folder that `funcrl.restore` reads
TOKENIZER = "tokenizer"  # files for transformers, of a run whose model began from nothing
REFERENCE = "reference"  # the policy of step 0, for a KL penalty
# The key in environment.json of the names of parts that a run was given as objects.
OBJECTS = "objects"

_LONGEST_LINE = 1 << 24  # in bytes; a completion of a million tokens has a third of that
_MOST_FACTS = 1 << 20  # in bytes
_LAST_STEP = 1 << 53  # the largest that a float, and so a plot, represents exactly


class Completion(NamedTuple):
    """A logged completion, one line of completions.jsonl."""

    step: int
    prompt: str
    completion: str
    answer: str
    reward: float
    rewards: dict[str, float]
    finish_reason: str
    policy_version: int
    advantage: float | None = None  # the algorithm's; None where the step does not train on it
    # Of some completions, each token's text, and its log-probability as the generator and the
    # trainer computed it with the same parameters; None for a token that was not sampled.
    tokens: list[str] | None = None
    logprobs: list[float | None] | None = None
    trainer_logprobs: list[float | None] | None = None
    extra: dict[str, Any] | None = None  # what reward functions have logged of it, by column

    def to_row(self) -> dict[str, Any]:
        """Return the fields that have a value."""
        return {name: value for name, value in self._asdict().items() if value is not None}


def read_facts(folder: str | Path, function: str = "read_facts") -> dict[str, str]:
    """Return the facts that a run recorded about its machine and its task; none without a file.

    Args:
        folder: the run's.
        function: the public function that was given it, for errors.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> runs.read_facts(pathlib.Path(tempfile.mkdtemp()))
        {}
    """
    path = Path(folder) / ENVIRONMENT
    facts = read_json(function, path, _MOST_FACTS) if path.exists() else {}
    for name, value in facts.items():
        if not isinstance(value, str):
            raise ValueError(
                f"{function} expects a text as {brief(name)} in {path}, got {brief(value)}."
            )
    return facts


def recorded_count(folder: Path, name: str, function: str = "recorded_count") -> int | None:
    """Return a count that a run recorded about its task, None if it did not."""
    text = read_facts(folder, function).get(name)
    if text is None:
        return None
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise ValueError(
            f"{function} expects a count as {name!r} of {folder / ENVIRONMENT}, got "
            f"{repr(text)[:80]}."
        )
    return int(text)


# How a run that was given objects is used in Python, by the function that is called.
_CALLS = {"train": "funcrl.train(config, ", "evaluate": "funcrl.evaluate(config, "}


def check_given(function: str, folder: Path, needed: Collection[str]) -> None:
    """Raise if a run was given one of these parts as an object, which its configuration lacks."""
    facts = read_facts(folder, function)
    objects = [part for part in facts.get(OBJECTS, "").split() if part in needed]
    call = _CALLS.get(function, f"funcrl.load_run({str(folder)!r}, ")
    name = facts.get("task_object") if "task" in needed else None
    if objects:
        objects = [*([] if name is None else ["task"]), *objects]
        given = ", ".join(f"{part}=..." for part in objects)
        raise ValueError(
            f"{function} expects parts=, with {' and '.join(objects)} as {folder} was given in "
            f"Python, which a command cannot make again, got none; {call}parts=parts) can, with "
            f"parts = funcrl.build(config, {given})."
        )
    if name is not None:
        raise ValueError(
            f"{function} expects task=, the object {name!r} that {folder} was given in Python, "
            f"which a command cannot make again, got none; {call}task=...) can."
        )


def append_lines(path: str | Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append one JSON object a line; numbers that JSON cannot write become null.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> runs.append_lines(path, [{"step": 1, "loss": 0.5}, {"step": 2, "loss": float("nan")}])
        >>> runs.read_lines(path)
        [{'step': 1, 'loss': 0.5}, {'step': 2, 'loss': None}]
    """
    text = "".join(_line(row) for row in rows)
    try:
        # A link could lead to any file, and is not followed.
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with open(handle, "a", **ENCODING) as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def sync_lines(folder: Path) -> None:
    """Return when the lines of a run are on disk."""
    for path in (folder / METRICS, folder / COMPLETIONS):
        if path.exists():
            sync(path)


def read_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a file of JSON lines; none when there is no file.

    A last line that a crash cut off is left out. A broken line before it means that something
    else wrote here, and is an error that names the line.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> _ = path.write_text('{"step": 1}\\n{"step": 2, "lo')
        >>> runs.read_lines(path)
        [{'step': 1}]
    """
    return [row for _, row in each_line("read_lines", Path(path))]


def each_line(function: str, path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows that `read_lines` returns, each with the number of its line."""
    if not path.exists():
        return
    with open_file(function, path) as file:
        for number in itertools.count(1):
            line = file.readline(_LONGEST_LINE + 1)
            if len(line) > _LONGEST_LINE:
                raise ValueError(
                    f"{function} expects lines of at most {_LONGEST_LINE} bytes, got a longer one "
                    f"in line {number} of {path}."
                )
            # A line without its end was cut off by a crash, perhaps inside a character.
            if not line.endswith(b"\n"):
                return
            try:
                row, reason = parse_json(line.decode("utf-8")), ""
            except ValueError as error:
                row, reason = None, f" ({str(error)[:100]})"
            if not isinstance(row, dict):
                raise ValueError(
                    f"{function} expects one JSON object a line, got {line[:60].strip()!r} in line "
                    f"{number} of {path}{reason}."
                )
            yield number, row


def step_of(function: str, path: Path, number: int, row: Mapping[str, Any]) -> int:
    """Return the step of a row, as `each_line` gives it with the number of its line."""
    step = row.get("step")
    if type(step) is not int or not 0 <= step <= _LAST_STEP:
        raise ValueError(
            f"{function} expects step to be an integer from 0 on, got {brief(step)} in line "
            f"{number} of {path}."
        )
    return step


def read_history(folder: str | Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps; null in the file, for numbers not finite, is NaN.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> runs.append_lines(folder / runs.METRICS, [{"step": 1, "loss": float("inf")}])
        >>> runs.read_history(folder)
        [{'step': 1, 'loss': nan}]
    """
    rows = read_lines(Path(folder) / METRICS)
    return [{key: math.nan if row[key] is None else row[key] for key in row} for row in rows]


def keep_until(path: Path, step: int, source: Path | None = None) -> int | None:
    """Drop the rows after `step`, and a torn last line: what a resumed run will write again.

    With a `source`, its rows are taken. Returns the step of the last row that is kept, None if
    there is none.
    """
    last, source = None, source or path
    if source.exists() or path.is_symlink():  # a link to nothing would be written through
        with whole_file(path) as file:
            for number, row in each_line("train", source):
                if (own := step_of("train", source, number, row)) <= step:
                    file.write(bytes(_line(row), **ENCODING))
                    last = own
    return last


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(_finite(row), ensure_ascii=False) + "\n"


def _finite(value: Any) -> Any:
    """Return the value with NaN and infinities, which JSON does not have, as None."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return value
