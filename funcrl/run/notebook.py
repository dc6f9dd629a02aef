"""Shows a run in a notebook, in one output that is drawn again as the run goes on."""

import math
import sys
import time
from collections.abc import Sequence
from typing import Any

from funcrl.core.terminal import print_safely
from funcrl.run.accuracy import held_out
from funcrl.run.pace import LABEL, Pace, remark, short, shown_numbers, visible
from funcrl.run.report.markup import text
from funcrl.run.runs import Completion, Row

_LONGEST = 300  # of a completion, in characters
_WIDTH, _HEIGHT = 600, 120  # of the curves
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
        """Return the curves so far, all between the lowest and the highest value."""
        values = [value for points in self._curves.values() for _, value in points]
        if not values:
            return ""
        low, span = min(values), (max(values) - min(values)) or 1.0

        def line(name: str, points: Sequence[tuple[int, float]]) -> str:
            stride = max(len(points) // _WIDTH, 1)
            places = " ".join(
                f"{_WIDTH * step / total:.0f},{_HEIGHT * (0.95 - 0.9 * (value - low) / span):.1f}"
                for step, value in points[::stride]
            )
            style = f'fill="none" stroke="{_COLORS[name]}" stroke-width="2"'
            return f'<polyline points="{places}" {style}/>'

        lines = "".join(line(name, points) for name, points in self._curves.items() if points)
        evaluated = visible(self._evaluated[0], LABEL) if self._evaluated else "held out"
        labels = {"reward": "reward", "held out": evaluated}
        names = ", ".join(f'<span style="color:{_COLORS[name]}">{text(label)}</span>'
                          for name, label in labels.items())  # fmt: skip
        size = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width:{_WIDTH}px;width:100%"'
        return f"<svg {size}>{lines}</svg><br>{names} from {short(low)} to {short(max(values))}"
