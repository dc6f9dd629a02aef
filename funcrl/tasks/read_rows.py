"""Reads rows of data: .jsonl, .json, .csv and .parquet files, or objects that hold mappings."""

import csv
import io
import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from funcrl.core import checks
from funcrl.core.files import brief, open_file

Row = dict[str, Any]
SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")


class Table(NamedTuple):
    """Rows of data, and where each of them stands."""

    name: str  # what errors call all of them
    rows: list[Row]
    numbers: list[int]  # of each row, in `units` of what the name says
    unit: str = "row"

    def place(self, index: int) -> str:
        """Return where a row stands, such as `line 3 of data.jsonl`."""
        return f"{self.unit} {self.numbers[index]} of {self.name}"

    def checked(self, function: str) -> "Table":
        """Return the table; raise if it has no rows, or rows of different columns."""
        if not self.rows:
            raise ValueError(f"{function} expects rows in {self.name}, got none.")
        columns = self.rows[0].keys()
        for index, row in enumerate(self.rows):
            if row.keys() != columns:
                missing = [each for each in columns if each not in row]
                more = [each for each in row if each not in columns]
                found = f"no {missing[0]!r}" if missing else f"{brief(more[0])} besides"
                raise ValueError(
                    f"{function} expects the columns of the first row in every row "
                    f"({_listed(columns)}), got {found} in {self.place(index)}."
                )
        return self


def read_records(task: str, path: Path) -> list[Row]:
    """Return the rows of a file; `task` is the name of the one that reads it, for errors."""
    return read_table(task, path).rows


def read_table(function: str, path: Path) -> Table:
    """Return the rows of a file, whose suffix is one of `SUFFIXES`."""
    if path.suffix == ".parquet":
        return _parquet(function, path)
    if path.suffix == ".json":
        return _json(function, path)
    with open_file(function, path) as file:
        lines = _text_lines(function, path, file)
        read = _csv if path.suffix == ".csv" else _json_lines
        return _numbered(path, read(function, path, lines))


def read_dataset(function: str, name: str, config: str | None, split: str) -> Table:
    """Return the rows of a split of a data set: of a hub, or of a folder in its form."""
    datasets = checks.import_extra(function, "datasets", f"for {name}", "'funcrl[models]'")
    # Its cache takes folders of one name for one, and would give another's rows.
    own_cache = tempfile.TemporaryDirectory() if Path(name).is_dir() else nullcontext()
    try:
        with own_cache as cache:
            rows = datasets.load_dataset(name, config, split=split, cache_dir=cache)
            return to_table(function, rows, f"{split} of {name}")
    except Exception as error:  # of many kinds: of the network, the hub, the files
        reason = " ".join(str(error).split())[:300]
        raise ValueError(
            f"{function} expects a folder, or a data set of the hub, that can be read: ORG/NAME or "
            f"ORG/NAME:CONFIG with a split {split!r}, got {name!r} with {config!r}: {reason}"
        ) from error


def _numbered(path: Path, rows: Iterable[tuple[int, Row]]) -> Table:
    found = list(rows)
    return Table(str(path), [row for _, row in found], [n for n, _ in found], "line")


def to_table(function: str, rows: object, name: str) -> Table:
    """Return the rows of an object in memory: an iterable of mappings, or one with len and [i].

    Args:
        function: that is given them, for errors.
        rows: a list of dicts, a `datasets.Dataset`, or what is like these.
        name: what to call them in errors.
    """
    if isinstance(rows, str | bytes | Mapping):
        raise TypeError(f"{function} expects rows, a list of mappings, got {brief(rows)}.")
    if hasattr(rows, "__len__") and hasattr(rows, "__getitem__"):
        found: Iterable[Any] = _items(rows)
    elif isinstance(rows, Iterable):
        found = rows
    else:
        raise TypeError(f"{function} expects rows, a list of mappings, got {brief(rows)}.")
    made = []
    for number, row in enumerate(found):
        if not isinstance(row, Mapping) or not all(isinstance(each, str) for each in row):
            raise TypeError(
                f"{function} expects each row to be a mapping from the names of columns, got "
                f"{brief(row)} as rows[{number}]."
            )
        made.append(dict(row))
    return Table(name, made, list(range(len(made))), "row")


def _items(rows: Any) -> Iterator[Any]:
    """Yield the items of an object with len and [i], of which a pandas table is none."""
    if hasattr(rows, "to_dict") and hasattr(rows, "iloc"):
        yield from rows.to_dict("records")
    else:
        yield from (rows[index] for index in range(len(rows)))


def _text_lines(function: str, path: Path, file: Iterable[bytes]) -> Iterator[str]:
    for number, raw in enumerate(file, start=1):
        try:
            yield raw.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{function} expects text in UTF-8, got {error.reason} in line {number} of {path}."
            ) from error


def _json_lines(function: str, path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Row]]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if not isinstance(row, dict):
                raise ValueError(
                    f"{function} expects one JSON object a line, got {line.strip()[:60]!r} in line "
                    f"{number} of {path}."
                )
            yield number, row


def _json(function: str, path: Path) -> Table:
    """Return the rows of a file that is one list of objects, or has one object a line."""
    with open_file(function, path) as file:
        lines = list(_text_lines(function, path, file))
    text = "".join(lines)
    if text.lstrip()[:1] != "[":
        return _numbered(path, _json_lines(function, path, lines))
    try:
        rows = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{function} expects JSON in {path}, got: {error}.") from error
    return to_table(function, rows, str(path))


def _csv(function: str, path: Path, lines: Iterable[str]) -> Iterator[tuple[int, Row]]:
    """Yield the rows of a CSV file, each with the line that it begins in."""
    reader = csv.reader(lines, strict=True)
    columns: list[str] | None = None
    start = 1
    try:
        for fields in reader:
            if columns is None:
                columns = fields
                if "" in fields or len({*fields}) < len(fields):
                    raise csv.Error(f"an unnamed column, or one twice: {_listed(fields)}")
            elif fields:
                if len(fields) != len(columns):
                    raise csv.Error(f"{len(fields)} fields for {len(columns)} columns")
                yield start, dict(zip(columns, fields, strict=True))
            start = reader.line_num + 1
    except csv.Error as error:
        raise ValueError(
            f"{function} expects rows of CSV below a line of column names, got {error} in line "
            f"{start} of {path}."
        ) from error


def _parquet(function: str, path: Path) -> Table:
    install = "'funcrl[models]', which has pyarrow"
    parquet = checks.import_extra(function, "pyarrow.parquet", f"for {path}", install)
    with open_file(function, path) as file:
        content = io.BytesIO(file.read())
    try:
        rows: list[Row] = parquet.read_table(content).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's own errors are ValueErrors
        reason = " ".join(str(error).split())[:200]
        raise ValueError(f"{function} expects parquet in {path}, got: {reason}") from error
    return Table(str(path), rows, list(range(1, len(rows) + 1)), "row")


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(columns)[:300]
