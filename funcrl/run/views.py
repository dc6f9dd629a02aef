"""Shows a run: as plain lines, in a notebook, or on a terminal (`terminal.py`)."""

import math
import sys
import time
from collections.abc import Sequence
from typing import Any, Protocol, TextIO

from funcrl.core.printing import print_safely
from funcrl.run.accuracy import LABEL, Pace, held_out, remark, short, shown_numbers, visible
from funcrl.run.report.run import text
from funcrl.run.runs import Completion, Row


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
    if stream.isatty():
        from rich.console import Console  # which nothing but a terminal needs

        from funcrl.run.terminal import LiveView

        return LiveView(Console(file=stream))
    return PlainView(stream)


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


_LONGEST = 300  # of a completion, in characters
_WIDTH, _HEIGHT = 600, 150  # of the curves
_COLORS = {"reward": "#d9812b", "held out": "#3b6fb6"}


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")
    return hasattr(ipython.get_ipython(), "kernel") if ipython is not None else False


class NotebookView:
    """Progress, numbers, curves of reward and accuracy, and a completion.

    Args:
        every: seconds between two drawings; the last step is always drawn.
    """

    def __init__(self, every: float = 0.5) -> None:
        self._every, self._last = every, -math.inf
        self._pace, self._title = Pace(0, 0), ""
        self._handle: Any = None
        self._curves: dict[str, list[tuple[int, float]]] = {name: [] for name in _COLORS}
        self._evaluated: tuple[str, float] | None = None
        self._shown: tuple[Row, Completion | None] | None = None

    def start(self, title: str, total: int, done: int) -> None:
        """Begin the output."""
        self._title, self._pace = title, Pace(total, done)
        self._draw(f"<b>{text(title)}</b>")

    def step(self, row: Row, completion: Completion | None) -> None:
        """Draw the step when it is time."""
        self._pace.tick(row)
        found = held_out(row)
        self._evaluated = found or self._evaluated
        values = {"reward": row.get("reward"), "held out": found and found[1]}
        for name, points in self._curves.items():
            if (value := values[name]) is not None and math.isfinite(value):
                points.append((row["step"], value))
        self._shown = row, completion
        now = time.monotonic()
        if now - self._last >= self._every:
            self._last = now
            self._draw(self._html(row, completion))

    def note(self, text: str) -> None:
        """Print the line below."""
        print_safely(text)

    def close(self) -> None:
        """Draw the last step."""
        if self._shown is not None:
            self._draw(self._html(*self._shown))

    def _draw(self, content: str) -> None:
        from IPython.display import HTML, display  # only in a notebook, which brings it

        if self._handle is None:
            self._handle = display(HTML(content), display_id=True)
        else:
            self._handle.update(HTML(content))

    def _html(self, row: Row, completion: Completion | None) -> str:
        total = max(self._pace.total, 1)
        numbers = shown_numbers(row, self._evaluated)
        cells = "&emsp;".join(
            f"{text(visible(label, LABEL))} <b>{short(value)}</b>"
            for label, value in numbers
            if value is not None
        )
        parts = [
            f"<b>{text(self._title)}</b>",
            f'step {row["step"]} of {total} <progress value="{row["step"]}" max="{total}">'
            f"</progress> {self._pace.left()} left",
            "&emsp;".join(filter(None, (cells, remark(row)))),
            self._svg(total),
        ]
        if completion is not None:
            asked, said = (visible(each, _LONGEST) for each in completion[1:3])
            parts.append(
                f"<code>{text(asked)}<b>{text(said)}</b></code> reward {short(completion.reward)}"
            )
        return "<br>".join(parts)

    def _svg(self, total: int) -> str:
        """Return the curves so far, on axes from the lowest to the highest value and step."""
        values = [value for points in self._curves.values() for _, value in points]
        if not values:
            return ""
        low, span = min(values), (max(values) - min(values)) or 1.0
        left, bottom = 44, _HEIGHT - 16  # of the axes' corner

        def line(name: str, points: Sequence[tuple[int, float]]) -> str:
            stride = max(len(points) // _WIDTH, 1)
            places = " ".join(
                f"{left + (_WIDTH - left - 4) * step / total:.0f},"
                f"{8 + (bottom - 8) * (1 - (value - low) / span):.1f}"
                for step, value in points[::stride]
            )
            style = f'fill="none" stroke="{_COLORS[name]}" stroke-width="2"'
            return f'<polyline points="{places}" {style}/>'

        def mark(x: int, y: int, side: str, content: str) -> str:
            style = f'font-size="11" fill="gray" text-anchor="{side}"'
            return f'<text x="{x}" y="{y}" {style}>{text(content)}</text>'

        axes = (
            f'<path d="M{left} 4 V{bottom} H{_WIDTH}" fill="none" stroke="gray"/>'
            + mark(left - 4, 12, "end", short(max(values)))
            + mark(left - 4, bottom, "end", short(low))
            + mark(left, _HEIGHT - 3, "start", "0")
            + mark(_WIDTH, _HEIGHT - 3, "end", f"step {total}")
        )
        lines = "".join(line(name, points) for name, points in self._curves.items() if points)
        evaluated = visible(self._evaluated[0], LABEL) if self._evaluated else "held out"
        labels = {"reward": "reward", "held out": evaluated}
        names = ", ".join(f'<span style="color:{_COLORS[name]}">{text(label)}</span>'
                          for name, label in labels.items())  # fmt: skip
        size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width:{_WIDTH}px;width:100%"'
        return f"<svg {size}>{axes}{lines}</svg><br>{names}"
