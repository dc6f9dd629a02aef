"""The folder of a run: the names of its files, and lines that survive a crash.

RUN/config.yaml         the resolved configuration
RUN/environment.json    machine, versions, command
RUN/metrics.jsonl       one JSON object a step
RUN/completions.jsonl   one JSON object a logged completion
RUN/checkpoints/        what `funcrl.restore` reads
"""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

Row: TypeAlias = Mapping[str, Any]  # a step's metrics

CONFIG = "config.yaml"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
COMPLETIONS = "completions.jsonl"
CHECKPOINTS = "checkpoints"

# A lone surrogate, which a tokenizer may give and UTF-8 does not have, becomes JSON's own escape.
_TEXT: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


class Completion(NamedTuple):
    """One completion to look at."""

    step: int
    prompt: str
    completion: str
    answer: str
    reward: float
    rewards: dict[str, float]
    finish_reason: str
    policy_version: int


def read_facts(folder: Path) -> dict[str, str]:
    """Return what a run wrote down about its machine and its task; nothing when there is no file.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> runs.read_facts(pathlib.Path(tempfile.mkdtemp()))
        {}
    """
    path = folder / ENVIRONMENT
    facts: dict[str, str] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return facts


def recorded_count(folder: Path, name: str) -> int | None:
    """Return a count that a run wrote down about its task, None if it did not.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / runs.ENVIRONMENT).write_text('{"vocab_size": "13"}')
        >>> runs.recorded_count(folder, "vocab_size"), runs.recorded_count(folder, "max_turns")
        (13, None)
    """
    text = read_facts(folder).get(name)
    if text is None:
        return None
    if not (isinstance(text, str) and text.isascii() and text.isdigit() and 0 < len(text) < 10):
        raise ValueError(
            f"recorded_count expects a count as {name!r} of {folder / ENVIRONMENT}, got "
            f"{repr(text)[:80]}."
        )
    return int(text)


def check_task_named(function: str, folder: Path) -> None:
    """Raise if a run was given its task as an object, which its configuration does not name.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> _ = (folder / runs.ENVIRONMENT).write_text('{"task_object": "mine"}')
        >>> try:
        ...     runs.check_task_named("evaluate", folder)
        ... except ValueError as error:
        ...     print(str(error)[:34])
        evaluate expects task=, the object
    """
    name = read_facts(folder).get("task_object")
    if name is not None:
        raise ValueError(
            f"{function} expects task=, the object {name!r} that {folder} was trained on, got none."
        )


def append_lines(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
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
        # A link would have lines written wherever it leads.
        handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        with open(handle, "a", **_TEXT) as file:
            file.write(text)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error


def read_lines(path: Path) -> list[dict[str, Any]]:
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
    if not path.exists():
        return []
    # A line counts once its end is written; a cut may fall inside a character.
    *whole, _ = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(whole, start=1):
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(
                f"read_lines expects one JSON object a line, got {line[:60]!r} in line {number} "
                f"of {path}."
            ) from error
        if not isinstance(row, dict):
            raise ValueError(
                f"read_lines expects JSON objects, got {line[:60]!r} in line {number} of {path}."
            )
        rows.append(row)
    return rows


def read_history(folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of a run's steps; what is null in its file, for it was not finite, is NaN.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> runs.append_lines(folder / runs.METRICS, [{"step": 1, "loss": float("inf")}])
        >>> runs.read_history(folder)
        [{'step': 1, 'loss': nan}]
    """
    rows = read_lines(folder / METRICS)
    return [{key: math.nan if row[key] is None else row[key] for key in row} for row in rows]


def keep_until(path: Path, step: int) -> None:
    """Drop the rows after `step`, and a torn last line: what a resumed run will write again.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> runs.append_lines(path, [{"step": 1}, {"step": 2}])
        >>> runs.keep_until(path, 1)
        >>> runs.read_lines(path)
        [{'step': 1}]
    """
    if path.exists():
        rows = [row for row in read_lines(path) if row["step"] <= step]
        write_whole(path, "".join(_line(row) for row in rows))


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old text or the new one, never a part.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "config.yaml"
        >>> runs.write_whole(path, "steps: 3")
        >>> path.read_text()
        'steps: 3'
    """
    with whole_file(path) as file:
        file.write(bytes(text, **_TEXT))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to that becomes `path` at the end, or nothing if an error ends it.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl import runs
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "numbers"
        >>> with runs.whole_file(path) as file:
        ...     _ = file.write(b"123")
        >>> path.read_bytes()
        b'123'
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with draft.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


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
