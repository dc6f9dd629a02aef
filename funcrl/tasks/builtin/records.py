"""Reads problems from files, and draws from them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from funcrl.core import checks, rng
from funcrl.tasks.contracts import Prompt, Task, Tokenizer


class RecordedTask(Task):
    """Base class of tasks whose problems are read from files, each with its solution as `data`."""

    def __init__(
        self, train: Sequence[Prompt], test: Sequence[Prompt], tokenizer: Tokenizer
    ) -> None:
        check_apart(self.name, train, test)
        self._train, self._test, self.tokenizer = train, test, tokenizer

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return problems to train on: every epoch is a permutation of them."""
        return epochs(self._train, seed, start, count)

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out problems, spread over them."""
        return spread(self._test, count)

    def demonstrate(self, prompt: Prompt) -> str:
        """Return the solution that the data has."""
        return str(prompt.data)


def read_records(task: str, path: Path) -> list[dict[str, Any]]:
    """Return the rows of a .jsonl or .parquet file; `task` is the name of the one that reads it."""
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
    """Raise if a problem is in both splits."""
    both = {prompt.text for prompt in train} & {prompt.text for prompt in test}
    if both:
        raise ValueError(
            f"{task} expects no problem in both train and test, got {min(both)[:80]!r}."
        )


def epochs(problems: Sequence[Prompt], seed: int, start: int, count: int) -> list[Prompt]:
    """Return the problems number start, start + 1, ... of a stream of permutations of them all."""
    orders: dict[int, list[int]] = {}
    chosen = []
    for index in range(start, start + count):
        epoch, place = divmod(index, len(problems))
        if epoch not in orders:
            orders[epoch] = _shuffled(len(problems), seed, epoch)
        chosen.append(problems[orders[epoch][place]])
    return chosen


def spread(problems: Sequence[Prompt], count: int) -> list[Prompt]:
    """Return `count` problems at pseudo-random places of the sequence, always the same."""
    return [problems[row] for row in _shuffled(len(problems), 1)[:count]]


def _shuffled(length: int, *seed: int) -> list[int]:
    return sorted(range(length), key=lambda row: rng.fold_in(*seed, row))
