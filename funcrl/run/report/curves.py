"""The curves of a page: a picture of each panel, with its values for the pointer to find."""

import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from funcrl.run.report.markup import data, plain, text
from funcrl.run.report.plots import (
    AFTER_WARM_START,
    BOX,
    MOST_LINES,
    MOST_OTHERS,
    OTHERS,
    Drawn,
    Panel,
    Run,
    constants,
    draw,
    draw_one,
    groups,
    intervals,
    rewards,
    shown,
    warm_start,
)

_MOST_POINTS = 12_000  # of all lines of a page, among those that the pointer can find
_FEWEST_POINTS = 50  # of a line

SavePicture = Callable[[str, bytes], None]


def section(runs: Sequence[Run], save: SavePicture | None = None, only: Sequence[str] = ()) -> str:
    """Return groups of curves.

    Args:
        runs: one, or several to compare.
        save: called with the name of a picture's file and its content, for each group.
        only: the groups to draw, all when left out.
    """
    found = groups(runs)
    found = {group: panels for group, panels in found.items() if not only or group in only}
    if not found:
        return "<h2>Curves</h2><p>No step has been logged yet.</p>"
    drawn = {group: panels[:MOST_OTHERS] if group == OTHERS else panels
             for group, panels in found.items()}  # fmt: skip
    num_lines = sum(len(panel.names) for panels in drawn.values() for panel in panels)
    most = max(_MOST_POINTS // max(num_lines * len(runs), 1), _FEWEST_POINTS)
    parts: list[str] = []
    values: list[dict[str, Any]] = []
    for group, panels in drawn.items():
        name = group.lower().replace(" ", "_")
        if save is not None:
            png = io.BytesIO()
            # A picture of many panels side by side would be too wide to read.
            draw(panels[:4], runs).savefig(png, format="png", dpi=150)
            save(f"{name}.png", png.getvalue())
        figures = []
        for number, panel in enumerate(panels):
            one = draw_one(panel, runs, f"{name}_{number}", most)
            figures.append(f'<figure data-panel="{len(values)}">{one.svg}</figure>')
            values.append(_for_the_pointer(one, runs))
        parts += [f"<h2>{group}</h2>", f'<div class="curves">{"".join(figures)}</div>']
    parts += [f"<p>{line}</p>" for line in _remarks(runs, found)]
    return "\n".join([*parts, data("curves-data", values)])


def _for_the_pointer(drawn: Drawn, runs: Sequence[Run]) -> dict[str, Any]:
    zero = AFTER_WARM_START if any(warm_start(run) for run in runs) else ""
    return {
        "box": BOX,
        "x": list(drawn.horizontal),
        "zero": zero,
        "lines": [{"label": label, "color": color, "steps": steps, "values": values}
                  for label, color, steps, values in drawn.lines],
    }  # fmt: skip


def _remarks(runs: Sequence[Run], found: Mapping[str, Sequence[Panel]]) -> list[str]:
    """Return sentences about what is not drawn of groups, and how the rest is."""
    lines, num_others = [], len(found.get(OTHERS, ()))
    for run in runs:
        count = len(rewards(run.metrics))
        if count > MOST_LINES and "Rewards" in found:
            lines.append(f"{MOST_LINES} of the {count} rewards of {text(run.name)} are drawn.")
    if num_others > MOST_OTHERS:
        lines.append(f"{MOST_OTHERS} of the {num_others} other metrics are drawn.")
    if still := constants(runs):
        listed = [f"{shown(name)} {plain(value)}" for name, value in still.items()][:MOST_LINES]
        lines.append(f"Never changed: {text(', '.join(listed))}.")
    if any(map(intervals, runs)) and "Learning curve" in found:
        lines.append("The band around the accuracy is its 95% interval (Wilson's).")
    lines.append("Faint lines are the steps; strong ones their exponential moving average over "
                 "about ten. Point at a curve for its values.")  # fmt: skip
    return lines
