"""The options that a run changed on its way, as rows of a table."""

from itertools import islice
from pathlib import Path

from funcrl.run import runs
from funcrl.run.changes import shown_change

COLUMNS = ("from step", "option", "was", "is")
_MOST_ROWS = 1000


def change_rows(folder: Path) -> list[list[str]]:
    """Return a row of `COLUMNS` for each change that a run's folder records."""
    path = folder / runs.CHANGES
    lines = islice(runs.each_line("report", path), _MOST_ROWS)
    return [
        [
            str(runs.step_of("report", path, number, row) + 1),
            *shown_change(*(row.get(name) for name in ("option", "from", "to"))),
        ]
        for number, row in lines
    ]
