"""Draws the curves of one run, or of several with a colour for each."""

import io
import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from funcrl.core.terminal import escaped

# matplotlib takes a second to import, which only a report should pay.
COLORS = ["#3b6fb6", "#d9812b", "#3a9a6b", "#b04a7c", "#7a6bc4", "#8a6d3b"]
_SMOOTH = 0.9
MOST_LINES = 40  # of a panel and a run
_MOST_POINTS = 2000  # of a line: more than a page has pixels
_LONGEST_LABEL = 60


class Run(NamedTuple):
    """A run read from its folder."""

    name: str
    folder: Path
    rows: list[dict[str, Any]]  # metrics.jsonl
    completions: list[dict[str, Any]]  # those to show
    config: dict[str, Any]
    environment: dict[str, Any]


class Panel(NamedTuple):
    """A set of axes and the metrics on it."""

    label: str  # of the vertical axis
    names: tuple[str, ...]  # metrics; "rewards/" for the means of all rewards
    logarithmic: bool = False


GROUPS: dict[str, tuple[Panel, ...]] = {
    "Learning curve": (Panel("accuracy, reward", ("eval/accuracy", "reward")),),
    "Rewards": (Panel("mean of each reward", ("rewards/",)),
                Panel("groups without a difference", ("frac_reward_zero_std",))),
    "Optimisation": (Panel("loss", ("loss",)), Panel("gradient norm", ("grad_norm",), True),
                     Panel("learning rate", ("learning_rate",))),
    "Policy": (Panel("entropy (nats)", ("entropy",)), Panel("KL to the reference", ("kl",)),
               Panel("clipped share", ("clip_ratio/low_mean", "clip_ratio/high_mean"))),
    "Completions": (Panel("tokens", ("completions/mean_length", "completions/min_length",
                                     "completions/max_length")),
                    Panel("cut off", ("completions/clipped_ratio",))),
    "Sampling mismatch": (
        Panel("log-prob difference", ("sampling/sampling_logp_difference/mean",
                                      "sampling/sampling_logp_difference/max"), True),
        Panel("importance ratio", ("sampling/importance_sampling_ratio/mean",))),
    "Time": (Panel("seconds a step", ("time/generate", "time/reward", "time/train", "time/push")),),
}  # fmt: skip


def series(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a metric, where it has one."""
    found = [(row["step"], row[name]) for row in run.rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: Sequence[float], keep: float = _SMOOTH) -> list[float]:
    """Return the exponential moving average, corrected for its start.

    m_t = keep m_{t-1} + (1 - keep) x_t,     shown as m_t / (1 - keep^t)
    """
    shown, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = keep * mean + (1 - keep) * value
        shown.append(mean / (1 - keep**count))
    return shown


def thin(steps: Sequence[int], values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return the lowest and the highest point of each short stretch of a line."""
    size = math.ceil(2 * len(steps) / _MOST_POINTS)
    if size < 3:
        return list(steps), list(values)
    kept: list[int] = []
    for first in range(0, len(steps), size):
        stretch = range(first, min(first + size, len(steps)))
        kept += sorted({f(stretch, key=values.__getitem__) for f in (min, max)})
    return [steps[place] for place in kept], [values[place] for place in kept]


def draw(group: str, runs: Sequence[Run]) -> Any:
    """Return the figure of a group, None when no run has any of its metrics."""
    from matplotlib.figure import Figure

    panels = [panel for panel in GROUPS[group] if any(_names(run, panel) for run in runs)]
    if not panels:
        return None
    width = 7.0 if len(panels) == 1 else 4.2 * len(panels)
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw_panel(axes, panel, runs)
    return figure


def to_svg(figure: Any, salt: str) -> str:
    """Return a figure as SVG to put into a page; `salt` keeps its ids apart from others'."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": salt}):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The same ids in two figures of one page would refer to the first one's shapes.
    mark = re.sub(r"\W", "", salt)
    return re.sub(r'(id="|href="#|url\(#)', rf"\1{mark}-", svg)


def _draw_panel(axes: Any, panel: Panel, runs: Sequence[Run]) -> None:
    lines = [(run, name) for run in runs for name in _names(run, panel)]
    handles, labels = [], []
    for number, (run, name) in enumerate(lines):
        several = len(runs) > 1
        color = COLORS[(list(runs).index(run) if several else number) % len(COLORS)]
        dashes = "-" if not several else ("-", "--", ":", "-.")[_names(run, panel).index(name) % 4]
        handles.append(_draw_line(axes, run, name, dashes, color))
        label = _label(name) if not several else f"{run.name}: {_label(name)}"
        label = label.replace("\n", " ").lstrip("_")  # matplotlib hides what begins so
        labels.append(escaped(label[:_LONGEST_LABEL]))
    if panel.logarithmic and all(
        value > 0 for run, name in lines for value in series(run, name)[1]
    ):
        axes.set_yscale("log")
    if panel.names[0] == "eval/accuracy":
        axes.set_ylim(0, None)
    if panel.names[0].startswith("time/"):
        # Otherwise one slow step would flatten the curves.
        values = sorted(value for run, name in lines for value in series(run, name)[1])
        axes.set_ylim(0, 1.5 * values[int(0.98 * (len(values) - 1))] or None)
    axes.set_xlabel("step")
    axes.set_ylabel(panel.label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2, linewidth=0.6)
    if len(lines) > 1:
        columns = 1 + len(lines) // 12
        legend = axes.legend(handles, labels, frameon=False, fontsize=8, ncols=columns)
        legend.set_in_layout(False)  # a long one would leave no room for the lines
        for text in legend.get_texts():
            text.set_parse_math(False)  # a name with $ in it is no mathematics


def _draw_line(axes: Any, run: Run, name: str, dashes: str, color: str) -> Any:
    """Draw a metric and return its line; a long one has its average drawn over faint points."""
    steps, values = series(run, name)
    if name == "eval/accuracy":
        return axes.plot(*thin(steps, values), dashes, color=color, marker="o", markersize=3.5)[0]
    if len(values) <= 20:
        return axes.plot(steps, values, dashes, color=color)[0]
    axes.plot(*thin(steps, values), color=color, alpha=0.2, linewidth=0.8)
    return axes.plot(*thin(steps, smooth(values)), dashes, color=color, linewidth=1.6)[0]


def _names(run: Run, panel: Panel) -> list[str]:
    """Return the panel's metrics that the run has, in order."""
    logged = dict.fromkeys(name for row in run.rows for name in row if row[name] is not None)
    found = []
    for name in panel.names:
        if name.endswith("/"):
            found += rewards(logged)[:MOST_LINES]
        elif name in logged:
            found.append(name)
    return found


def rewards(names: Iterable[str]) -> list[str]:
    """Return the metrics that are means of rewards."""
    return [each for each in names if each.startswith("rewards/") and each.endswith("/mean")]


def _label(name: str) -> str:
    if name == "eval/accuracy":
        return "accuracy (held out)"
    outer, _, inner = name.rpartition("/")
    shown = inner if outer in ("completions", "time") else name.removeprefix("rewards/")
    if outer.startswith("sampling"):
        shown = inner  # the axis has the rest as its label
    return shown.replace("/mean", "").replace("_", " ")
