"""Reads a run's folder, or raises one error that names the file and the line."""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from funcrl.core.reading import brief, read_yaml
from funcrl.run import runs
from funcrl.run.report.plots import Run

_MOST_ROWS, _MOST_NAMES = 1_000_000, 1000
_LARGEST = 1e100  # a number that can still be added up and drawn
_TEXTS = ("prompt", "completion", "answer", "finish_reason")
_LONGEST_TEXT = 20_000  # of a completion that is shown, in characters
_EACH_END = 3  # completions of a step to show, of the best and of the worst


def read_run(folder: Path) -> Run:
    """Return the content of a run's folder; only its metrics are required."""
    if not (folder / runs.METRICS).exists():
        raise FileNotFoundError(
            f"report expects the folder of a run, got {folder} without a {runs.METRICS}."
        )
    return Run(
        name=folder.resolve().name,
        folder=folder,
        rows=_metrics(folder / runs.METRICS),
        completions=_completions(folder / runs.COMPLETIONS),
        config=_config(folder / runs.CONFIG),
        environment=dict(runs.read_facts(folder, "report")),
    )


def _config(path: Path) -> dict[str, Any]:
    config = read_yaml("report", path) if path.exists() else None
    if not isinstance(config, dict | None):
        raise ValueError(f"report expects options in {path}, got {type(config).__name__}.")
    return config or {}


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of numbers; one that is not finite counts as none."""
    rows, names = [], set[str]()
    for number, row in _rows(path):
        runs.step_of("report", path, number, row)
        names |= row.keys()
        if len(names) > _MOST_NAMES:
            raise ValueError(
                f"report expects at most {_MOST_NAMES} metrics, got another one in line {number} "
                f"of {path}."
            )
        rows.append({name: _number(path, number, name, row[name]) for name in row})
    return rows


def _completions(path: Path) -> list[dict[str, Any]]:
    """Return some of the completions to show: of the first step, the middle one and the last."""
    steps: dict[int, list[tuple[float, int]]] = {}  # of each, rewards and lines
    for number, row in _rows(path):
        _check_completion(path, number, row)
        reward = -math.inf if row["reward"] is None else row["reward"]
        steps.setdefault(row["step"], []).append((-reward, number))
    several = sorted(step for step, lines in steps.items() if len(lines) > 1) or sorted(steps)
    chosen: list[int] = []
    for step in dict.fromkeys(several[at] for at in (0, len(several) // 2, -1) if several):
        lines = [number for _, number in sorted(steps[step])]
        chosen += lines if len(lines) <= 2 * _EACH_END else lines[:_EACH_END] + lines[-_EACH_END:]
    wanted = {number: row for number, row in _rows(path) if number in chosen} if chosen else {}
    return [
        wanted[number] | {name: _cut(wanted[number][name]) for name in _TEXTS} for number in chosen
    ]


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in runs.each_line("report", path):
        if number > _MOST_ROWS:
            raise ValueError(f"report expects at most {_MOST_ROWS} lines in {path}, got more.")
        yield number, row


def _check_completion(path: Path, number: int, row: dict[str, Any]) -> None:
    runs.step_of("report", path, number, row)
    for name in _TEXTS:
        if not isinstance(row.get(name), str):
            raise ValueError(
                f"report expects {name} to be a text, got {brief(row.get(name))} in line {number} "
                f"of {path}."
            )
    row["reward"] = _number(path, number, "reward", row.get("reward"))


def _number(path: Path, number: int, name: str, value: Any) -> float | None:
    if value is None or (type(value) is float and not math.isfinite(value)):
        return None
    if type(value) not in (int, float) or abs(value) > _LARGEST:
        raise ValueError(
            f"report expects {brief(name)} to be a number of at most {_LARGEST:g}, or null, got "
            f"{brief(value)} in line {number} of {path}."
        )
    return value


def _cut(text: str) -> str:
    rest = len(text) - _LONGEST_TEXT
    return text if rest <= 0 else f"{text[:_LONGEST_TEXT]}... and {rest} characters more"
