"""Shows a run live on a terminal."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from funcrl.core.printing import printable
from funcrl.run.accuracy import LABEL, Pace, held_out, remark, short, shown_numbers, visible
from funcrl.run.runs import Completion, Row

_BARS = "▁▂▃▄▅▆▇█"


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
