"""Rows: what every benchmark returns, prints as Markdown and writes as JSON."""

import json
import platform
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from funcrl.run.folder import processor


class Row(NamedTuple):
    """The measurement of one variant."""

    what: str
    shape: str  # in words
    variant: str
    median_s: float
    spread_s: float  # between the quartiles
    peak_bytes: int | None  # above what was allocated before the call; None if not measured
    machine: dict[str, str]  # and the versions of the libraries
    numbers: dict[str, float]  # others, of one benchmark alone, by keys of the table's columns
    time_ratio: float = 1.0  # to the first row of the same `what` and `shape`
    peak_ratio: float | None = None


# Of each key its title in the table, the factor to the title's unit, and the format.
_COLUMNS = {
    "median_s": ("ms", 1e3, ".1f"),
    "spread_s": ("spread", 1e3, ".1f"),
    "time_ratio": ("x", 1, ".2f"),
    "peak_bytes": ("peak MB", 1e-6, ".1f"),
    "peak_ratio": ("x", 1, ".2f"),
    "trace_s": ("trace s", 1, ".1f"),  # until there is a program to call
    "first_call_s": ("first call s", 1, ".1f"),  # which compiles
    "predicted_bytes": ("predicted MB", 1e-6, ".1f"),  # the graph's peak, beyond its inputs
    "computed_tokens": ("computed tokens", 1, ",.0f"),
    "padding": ("padding", 1, ".1%"),  # the share of computed tokens that are no sample's
    "tokens_per_s": ("tokens/s", 1, ",.0f"),
    "floor_tokens_per_s": ("floor tokens/s", 1, ",.0f"),
    "start_s": ("start s", 1, ".1f"),  # of an engine, until its first token
    "push_ms": ("push ms", 1, ".1f"),  # of all parameters
    "push_gb_per_s": ("push GB/s", 1, ",.1f"),
}


def describe_machine(device: str = "cpu") -> dict[str, str]:
    """Return the versions and the machine that a measurement belongs to."""
    machine = f"{processor()}, {torch.get_num_threads()} threads"
    if device == "cuda":
        machine = torch.cuda.get_device_name()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine,
        "date": time.strftime("%Y-%m-%d"),
    }


def compare(rows: Sequence[Row]) -> list[Row]:
    """Return the rows with their ratios to the first one of the same `what` and `shape`."""
    first: dict[tuple[str, str], Row] = {}
    compared = []
    for row in rows:
        base = first.setdefault((row.what, row.shape), row)
        ratio = None
        if row.peak_bytes is not None and base.peak_bytes is not None:
            ratio = row.peak_bytes / max(base.peak_bytes, 1)
        compared.append(row._replace(time_ratio=row.median_s / base.median_s, peak_ratio=ratio))
    return compared


def format_rows(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown tables, one for each shape, headed by the machine.

    A table has the columns of which one of its rows has a value.
    """
    lines = [describe(rows[0].machine)] if rows else []
    for shape in dict.fromkeys(row.shape for row in rows):
        own = [row for row in rows if row.shape == shape]
        values = [_flat(row) for row in own]
        keys = [key for key in _COLUMNS if any(each.get(key) is not None for each in values)]
        titles = ["what", "variant", *(_COLUMNS[key][0] for key in keys)]
        lines += ["", shape, "", _line(titles), "|---" * len(titles) + "|"]
        lines += [
            _line([row.what, row.variant, *(_cell(key, each.get(key)) for key in keys)])
            for row, each in zip(own, values, strict=True)
        ]
    return "\n".join(lines)


def format_columns(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown tables, one for each shape, with a column for each variant.

    Beside a median there is the spread, in parentheses, of what was measured several times.
    """
    machine = {name: value for row in rows for name, value in row.machine.items()}
    lines = [describe(machine)] if rows else []
    for shape in dict.fromkeys(row.shape for row in rows):
        own = {(row.what, row.variant): row for row in rows if row.shape == shape}
        variants = list(dict.fromkeys(variant for _, variant in own))
        lines += ["", shape, "", _line(["", *variants]), "|---" * (len(variants) + 1) + "|"]
        for what in dict.fromkeys(what for what, _ in own):
            lines += _lines_of(what, [own.get((what, variant)) for variant in variants])
    return "\n".join(lines)


def _lines_of(what: str, rows: Sequence[Row | None]) -> list[str]:
    """Return a table's lines of what was measured, one for each key that a row has a value of."""
    values = [{} if row is None else _flat(row) for row in rows]
    lines = []
    for key, (title, _, _) in _COLUMNS.items():
        if key in ("spread_s", "time_ratio", "peak_ratio"):
            continue
        cells = [_cell(key, each.get(key)) for each in values]
        if key == "median_s":
            spreads = [_cell("spread_s", each.get("spread_s") or None) for each in values]
            cells = [f"{cell} ({s})" if s else cell for cell, s in zip(cells, spreads, strict=True)]
        if any(cells):
            lines.append(_line([f"{what}, {title}", *cells]))
    return lines


def describe(machine: dict[str, str]) -> str:
    """Return a machine and its versions as one line."""
    return ", ".join(f"{name} {value}" for name, value in machine.items())


def finish(rows: Sequence[Row], path: Path | None, **versions: str) -> list[Row]:
    """Return rows with their ratios and the versions of what they were compared with.

    They are written to `path` too, if there is one.
    """
    rows = compare([row._replace(machine=row.machine | versions) for row in rows])
    write_rows(path, rows)
    return rows


def write_rows(path: Path | None, rows: Sequence[NamedTuple]) -> None:
    """Write the rows as a JSON list of flat objects, if there is a path to write to."""
    if path is not None:
        path.write_text(json.dumps([_flat(row) for row in rows], indent=1) + "\n")


def _flat(row: NamedTuple) -> dict[str, Any]:
    values = row._asdict()
    numbers, machine = values.pop("numbers", {}), values.pop("machine", {})
    return values | numbers | machine


def _cell(key: str, value: float | None) -> str:
    _, factor, form = _COLUMNS[key]
    return "" if value is None else format(factor * value, form)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
