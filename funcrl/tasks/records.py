"""Problems that come from files."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcrl.core import checks, rng
from funcrl.tasks.contracts import Prompt


def read_records(task: str, path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl or .parquet file.

    Args:
        task: the name of the task that reads, for errors.
        path: the file.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl.tasks.records import read_records
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "train.jsonl"
        >>> _ = path.write_text('{"question": "1+1?", "answer": "2"}')
        >>> read_records("mine", path)
        [{'question': '1+1?', 'answer': '2'}]
    """
    if path.suffix == ".parquet":
        parquet = checks.import_extra(task, "pyarrow.parquet", f"for {path}", "pyarrow")
        table: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
        return table
    rows = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                rows.append(_record(task, path, number, line))
    return rows


def _record(task: str, path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except ValueError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(
            f"{task} expects one JSON object a line, got {line[:60]!r} in line {number} of {path}."
        )
    return row


def check_apart(task: str, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
    """Raise if a problem is in both splits.

    Example:
        >>> from funcrl.tasks import Prompt
        >>> from funcrl.tasks.records import check_apart
        >>> check_apart("mine", [Prompt("a")], [Prompt("b")])
    """
    both = {prompt.text for prompt in train} & {prompt.text for prompt in test}
    if both:
        raise ValueError(
            f"{task} expects no problem in both train and test, got {min(both)[:80]!r}."
        )


def epochs(problems: Sequence[Prompt], seed: int, start: int, count: int) -> list[Prompt]:
    """Return the problems number start, start + 1, ... of a stream of permutations of them all.

    Example:
        >>> from funcrl.tasks import Prompt
        >>> from funcrl.tasks.records import epochs
        >>> problems = [Prompt("a"), Prompt("b"), Prompt("c")]
        >>> sorted(prompt.text for prompt in epochs(problems, seed=0, start=3, count=3))
        ['a', 'b', 'c']
    """
    orders: dict[int, list[int]] = {}
    chosen = []
    for index in range(start, start + count):
        epoch, place = divmod(index, len(problems))
        if epoch not in orders:
            orders[epoch] = _shuffled(len(problems), seed, epoch)
        chosen.append(problems[orders[epoch][place]])
    return chosen


def spread(problems: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` problems from all over the sequence, always the same.

    Example:
        >>> from funcrl.tasks import Prompt
        >>> from funcrl.tasks.records import spread
        >>> len(spread([Prompt("a"), Prompt("b"), Prompt("c")], 2))
        2
    """
    return [problems[row] for row in _shuffled(len(problems), 1)[:count]]


def _shuffled(length: int, *seed: int) -> list[int]:
    return sorted(range(length), key=lambda row: rng.fold_in(*seed, row))
