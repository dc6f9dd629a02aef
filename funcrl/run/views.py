"""Shows a run on the screen: live on a terminal, or as plain lines."""

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from funcrl.core.terminal import print_safely, printable
from funcrl.run.accuracy import held_out
from funcrl.run.notebook import NotebookView, in_notebook
from funcrl.run.pace import LABEL, Pace, remark, short, shown_numbers, visible
from funcrl.run.runs import Completion, Row

_BARS = "▁▂▃▄▅▆▇█"


class View(Protocol):
    """An object that shows a run on the screen."""

    def start(self, title: str, total: int, done: int) -> None:
        """Begin, after `done` of `total` steps."""

    def step(self, row: Row, completion: Completion | None) -> None:
        """Show a finished step."""

    def note(self, text: str) -> None:
        """Show a line that stays."""

    def close(self) -> None:
        """Restore the screen."""


def view_for(stream: TextIO) -> View:
    """Return the live view for a terminal or a notebook, and plain lines for anything else."""
    if stream is sys.stdout and in_notebook():
        return NotebookView()
    return LiveView(Console(file=stream)) if stream.isatty() else PlainView(stream)


class SilentView:
    """A view that shows nothing, for a notebook or a test."""

    def start(self, title: str, total: int, done: int) -> None:
        """Show nothing."""

    def step(self, row: Row, completion: Completion | None) -> None:
        """Show nothing."""

    def note(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Show nothing."""


class PlainView:
    """A line every few seconds, without control characters: for a file or a pipe.

    Args:
        stream: to write to.
        every: seconds between two lines; first, last and evaluated steps always have one.
    """

    def __init__(self, stream: TextIO, every: float = 5.0) -> None:
        self._stream, self._every = stream, every
        self._pace = Pace(0, 0)
        self._last = -math.inf

    def start(self, title: str, total: int, done: int) -> None:
        """Print the title."""
        self._pace = Pace(total, done)
        self._print(title)

    def step(self, row: Row, completion: Completion | None) -> None:
        """Print the step's numbers when it is time."""
        del completion
        self._pace.tick(row)
        now = time.monotonic()
        evaluated = held_out(row)
        ends = row["step"] in (1, self._pace.total) or evaluated is not None
        if not ends and now - self._last < self._every:
            return
        self._last = now
        numbers = [
            f"{visible(label, LABEL)} {short(value):>6}"
            for label, value in shown_numbers(row, evaluated)
        ]
        width = len(str(self._pace.total))
        head = f"step {row['step']:>{width}}/{self._pace.total}"
        parts = [head, *numbers, f"left {self._pace.left()}", remark(row)]
        self._print("  ".join(filter(None, parts)))

    def note(self, text: str) -> None:
        """Print the line."""
        self._print(text)

    def close(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def _print(self, text: str) -> None:
        print_safely(text, self._stream)


class LiveView:
    """A panel at the bottom of the terminal: progress, numbers, a sample completion."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, auto_refresh=False, vertical_overflow="crop")
        self._pace = Pace(0, 0)
        self._title = ""
        self._rewards: list[float] = []
        self._evaluated: tuple[str, float] | None = None

    def start(self, title: str, total: int, done: int) -> None:
        """Draw the empty panel."""
        self._title, self._pace = title, Pace(total, done)
        self._live.start()

    def step(self, row: Row, completion: Completion | None) -> None:
        """Draw the step."""
        self._pace.tick(row)
        if row.get("reward") is not None:
            self._rewards.append(row["reward"])
        self._evaluated = held_out(row) or self._evaluated
        parts: list[Any] = [self._progress(row), self._numbers(row)]
        if remark(row):
            parts.append(Text(remark(row), style="dim"))
        if completion is not None:
            parts.append(self._completion(completion))
        title = Text(printable(self._title), overflow="ellipsis", no_wrap=True)
        self._live.update(Panel(Group(*parts), title=title, title_align="left"), refresh=True)

    def note(self, text: str) -> None:
        """Print the line above the panel, unbroken, so that a command in it can be copied."""
        self._console.print(Text(printable(text)), soft_wrap=True)

    def close(self) -> None:
        """Leave the last panel where it is, and give the cursor back."""
        self._live.stop()

    def _progress(self, row: Row) -> Progress:
        progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=None),
            TextColumn("{task.fields[left]} left  {task.fields[speed]}"),
            console=self._console, expand=True,
        )  # fmt: skip
        speed = f"{short(row.get('step_time'))} s/step"
        progress.add_task(
            "", total=self._pace.total, completed=row["step"], left=self._pace.left(), speed=speed
        )
        return progress

    def _numbers(self, row: Row) -> Table:
        numbers = shown_numbers(row, self._evaluated)
        shown = [(visible(label, LABEL), value) for label, value in numbers if value is not None]
        if row.get("step_time") and row.get("num_tokens"):
            shown.append(("tokens/s", row["num_tokens"] / row["step_time"]))
        table = Table.grid(padding=(0, 2), expand=True)
        table.add_row(*(Text(label, style="dim", no_wrap=True) for label, _ in shown))
        table.add_row(*(Text(short(value), style="bold", no_wrap=True) for _, value in shown))
        room = max(self._console.width - 12, 10)
        grid = Table.grid(expand=True)
        grid.add_row(table)
        grid.add_row(Text("reward ", style="dim") + Text(sparkline(self._rewards, room)))
        return grid

    def _completion(self, completion: Completion) -> Text:
        """Return the completion as text without markup, because it may contain anything."""
        room = 3 * max(self._console.width - 4, 10)
        text = Text("\n")
        text.append(visible(completion.prompt, room), style="cyan")
        text.append(visible(completion.completion, room), style="bold")
        return text.append(f"   reward {short(completion.reward)}", style="dim")


def sparkline(values: Sequence[float], width: int) -> str:
    """Return values as bars between their lowest and highest, the last `width` of them."""
    shown = [value for value in values if math.isfinite(value)][-width:]
    if not shown:
        return ""
    low, span = min(shown), max(shown) - min(shown)
    scale = (len(_BARS) - 1) / span if span else 0.0
    return "".join(_BARS[math.floor((value - low) * scale + 0.5)] for value in shown)
