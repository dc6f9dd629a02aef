"""Draws the curves of one run, or of several with a colour for each."""

import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from funcrl.core.printing import escaped
from funcrl.run.accuracy import interval_of, is_held_out_reward, reward_of

# matplotlib takes a second to import, which only a report should pay.
# Colours of runs, or of the metrics of one; dashes of metrics where the colours are of runs.
COLORS = ["#3b6fb6", "#d9812b", "#3a9a6b", "#b04a7c", "#7a6bc4", "#8a6d3b"]
DASHES = {"-": "", "--": "4 2", ":": "1 2", "-.": "5 2 1 2"}  # as SVG writes them
_SMOOTH = 0.9
MOST_LINES = 40  # of a panel and a run
_MOST_POINTS = 400  # of a line: the page of a long run stays small
_LINE = re.compile(r' d="((?:[ML] [-.0-9]+ [-.0-9]+\s*)+)"')  # a line in SVG, without curves
# Names of groups, turns by nothing and indentation are half of a picture of few points.
_UNUSED = re.compile(r'(?<=<g) id="[^"]*"(?=>)| transform="rotate\(-0 [^"]*"|(?<=\n) +')
_LONGEST_LABEL = 60
# In inches: of a panel that can be read on a telephone, and of one as wide as three of them.
# The same scale gives all of them letters of one size.
NARROW, WIDE = (4.8, 3.2), (14.8, 4.4)
# Left, top, right and bottom around the axes, in inches: a layout that depends on the labels would
# take most of the time of a report.
_MARGINS = 0.888, 0.096, 0.072, 0.448
_MOST_ABOVE = 6  # names of lines above a picture's axes; more are on them
_SHORT_NAME = 24  # of which three fit side by side


class Run(NamedTuple):
    """A run read from its folder."""

    name: str
    folder: Path
    rows: list[dict[str, Any]]  # metrics.jsonl
    metrics: dict[str, tuple[list[int], list[float]]]  # of each the steps and the values it has
    completions: list[dict[str, Any]]  # those to list
    num_completions: int  # in completions.jsonl, listed or not
    config: dict[str, Any]
    environment: dict[str, Any]
    # Of a mean over seeds: lower and upper ends at the steps of each metric.
    bands: Mapping[str, tuple[list[float], list[float]]] = MappingProxyType({})


class Panel(NamedTuple):
    """A set of axes and the metrics on it."""

    label: str  # of the vertical axis
    names: tuple[str, ...]  # metrics; "rewards/" for the means of all rewards
    logarithmic: bool = False
    smooth: bool = True  # whether a long line is noisy, so that its average is drawn


class Drawn(NamedTuple):
    """A panel as a picture, and what a page needs to say which values are under the pointer."""

    svg: str
    box: tuple[float, float, float, float]  # the axes: left, top, right, bottom, as fractions
    horizontal: tuple[float, float]  # limits of the axes
    lines: list["Line"]


class Line(NamedTuple):
    """A metric of a run on a panel."""

    run: Run
    name: str  # of the metric
    label: str
    color: str
    dashes: str  # as matplotlib writes them
    artist: Any  # what matplotlib drew


GROUPS: dict[str, tuple[Panel, ...]] = {
    "Learning curve": (Panel("accuracy, reward", ("eval/accuracy", "eval/rewards/", "reward")),),
    "Rewards": (Panel("mean of each reward", ("rewards/",)),
                Panel("groups without a difference", ("frac_reward_zero_std",))),
    "Optimisation": (Panel("loss", ("loss", "eval/loss", "loss/policy",
                                             "loss/cross_entropy", "loss/teacher", "loss/value")),
                     Panel("gradient norm", ("grad_norm",), True),
                     Panel("learning rate", ("learning_rate",), smooth=False)),
    "Per-sample gradients": (
        Panel("norm before clipping", ("per_sample/grad_norm/mean", "per_sample/grad_norm/max"),
              True),
        Panel("clipped share", ("per_sample/clipped_frac",)),
        Panel("noise scale (samples)", ("per_sample/noise_scale",), True)),
    "Policy": (Panel("entropy (nats)", ("entropy",)), Panel("KL to the reference", ("kl",)),
               Panel("clipped share", ("clip_ratio/low_mean", "clip_ratio/high_mean"))),
    "Completions": (Panel("tokens", ("completions/mean_length", "completions/min_length",
                                     "completions/max_length")),
                    Panel("tokens of those that ended", (
                        "completions/mean_terminated_length", "completions/min_terminated_length",
                        "completions/max_terminated_length")),
                    Panel("cut off", ("completions/clipped_ratio",))),
    "Sampling mismatch": (
        Panel("log-prob difference", ("sampling/sampling_logp_difference/mean",
                                      "sampling/sampling_logp_difference/max"), True),
        Panel("importance ratio", ("sampling/importance_sampling_ratio/mean",))),
    "Time": (Panel("seconds a step", ("time/generate", "time/reward", "time/wait",
                                          "time/train", "time/push")),),
}  # fmt: skip
OTHERS = "Other metrics"
MOST_OTHERS = 24  # panels
# What the page says elsewhere, in words or in a table.
_SAID = {"step", "step_time", "num_tokens", "time/startup", "time/warm_start", "time/eval",
         "warm_start/steps", "warm_start/accuracy", "eval/num_prompts"}  # fmt: skip
AFTER_WARM_START = "after the warm start"


def series(run: Run, name: str) -> tuple[list[int], list[float]]:
    """Return the steps and the values of a metric, where it has one."""
    return run.metrics.get(name, ([], []))


def smooth(values: Sequence[float], keep: float = _SMOOTH) -> list[float]:
    """Return the exponential moving average, corrected for its start.

    m_t = keep m_{t-1} + (1 - keep) x_t,     shown as m_t / (1 - keep^t)
    """
    shown, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = keep * mean + (1 - keep) * value
        shown.append(mean / (1 - keep**count))
    return shown


def thin(
    steps: Sequence[int], values: Sequence[float], most: int = _MOST_POINTS
) -> tuple[list[int], list[float]]:
    """Return the lowest and the highest point of each short stretch of a line, `most` in all."""
    size = math.ceil(2 * len(steps) / most)
    if size < 3:
        return list(steps), list(values)
    kept: list[int] = []
    for first in range(0, len(steps), size):
        stretch = range(first, min(first + size, len(steps)))
        kept += sorted({f(stretch, key=values.__getitem__) for f in (min, max)})
    return [steps[place] for place in kept], [values[place] for place in kept]


def groups(runs: Sequence[Run]) -> dict[str, list[Panel]]:
    """Return the panels with anything to draw, by group; last, those of all other metrics.

    A metric of somebody's own is among the others, and so is one of funcrl's without a panel; one
    that never changes is in none, see `constants`.
    """
    found = {
        group: [panel for panel in panels if any(_names(run, panel) for run in runs)]
        for group, panels in GROUPS.items()
    }
    others = [Panel(name or "(no name)", (name,)) for name, values in _others(runs).items()
              if len(values) > 1]  # fmt: skip
    return {group: panels for group, panels in (found | {OTHERS: others}).items() if panels}


def constants(runs: Sequence[Run]) -> dict[str, float]:
    """Return the other metrics that never change, with their value."""
    return {name: values.pop() for name, values in _others(runs).items() if len(values) == 1}


def _others(runs: Sequence[Run]) -> dict[str, set[float]]:
    """Return the values of each metric that is in no panel of `GROUPS` and is not said in words."""
    names = dict.fromkeys(name for run in runs for name in run.metrics)
    panels = [panel for panels in GROUPS.values() for panel in panels]
    drawn = {name for run in runs for panel in panels for name in _names(run, panel)}
    drawn |= {name for run in runs for name in rewards(run.metrics)}
    drawn |= {name for run in runs for name in held_out_rewards(run.metrics)}
    return {name: {value for run in runs for value in series(run, name)[1]}
            for name in names if name not in drawn | _SAID}  # fmt: skip


def draw(panels: Sequence[Panel], runs: Sequence[Run]) -> Any:
    """Return the figure of a group's panels, side by side."""
    from matplotlib.figure import Figure

    width = 7.0 if len(panels) == 1 else 4.2 * len(panels)
    figure = Figure(figsize=(width, 3.6), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _name_lines(axes, _draw_panel(axes, panel, runs))
    return figure


def _name_lines(axes: Any, lines: Sequence[Line]) -> None:
    """Write the names of lines above the axes, or on them where there are many."""
    if len(lines) < 2:
        return
    labels = [line.label.lstrip("_") for line in lines]  # matplotlib hides what begins so
    options = {"frameon": False, "fontsize": 8, "labels": labels}
    options["handles"] = [line.artist for line in lines]
    if len(lines) <= _MOST_ABOVE:
        columns = 3 if max(map(len, labels)) <= _SHORT_NAME else 1
        legend = axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=columns, **options)
    else:
        legend = axes.legend(ncols=1 + len(lines) // 12, **options)
        legend.set_in_layout(False)  # a long one would leave no room for the lines
    for text in legend.get_texts():
        text.set_parse_math(False)  # a name with $ in it is no mathematics


def draw_one(panel: Panel, runs: Sequence[Run], salt: str, size: tuple[float, float]) -> Drawn:
    """Return a panel by itself, without the names of its lines; `size` is in inches."""
    from matplotlib.figure import Figure

    width, height = size
    left, right = _MARGINS[0] / width, 1 - _MARGINS[2] / width
    top, bottom = _MARGINS[1] / height, 1 - _MARGINS[3] / height
    figure = Figure(figsize=size)
    axes = figure.add_axes((left, 1 - bottom, right - left, bottom - top))
    lines = _draw_panel(axes, panel, runs)
    return Drawn(to_svg(figure, salt), (left, top, right, bottom), axes.get_xlim(), lines)


def to_svg(figure: Any, salt: str) -> str:
    """Return a figure as SVG to put into a page; `salt` keeps its ids apart from others'."""
    import matplotlib

    text = io.StringIO()
    with matplotlib.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": salt, "font.sans-serif": ["DejaVu Sans"]}
    ):
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue()
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    # The same ids in two figures of one page would refer to the first one's shapes.
    mark = re.sub(r"\W", "", salt)
    svg = _LINE.sub(_shorter, _UNUSED.sub("", svg))
    return re.sub(r'(id="|href="#|url\(#)', rf"\1{mark}-", svg)


def _shorter(line: re.Match[str]) -> str:
    """Return a line in tenths of a point, each place from the one before: a third as long."""
    parts, x, y = [], 0, 0
    for command, *place in re.findall(r"([ML]) (\S+) (\S+)", line[1]):
        right, down = (round(10 * float(number)) for number in place)
        if command == "M":
            x = y = 0
        parts.append(f"{'M' if command == 'M' else 'l'}{(right - x) / 10:g} {(down - y) / 10:g}")
        x, y = right, down
    return f' d="{"".join(parts)}"'


def _draw_panel(axes: Any, panel: Panel, runs: Sequence[Run]) -> list[Line]:
    """Draw a panel and return its lines."""
    lines: list[Line] = []
    several = len(runs) > 1
    for place, run in enumerate(runs):
        names = _names(run, panel)
        for number, name in enumerate(names):
            color = COLORS[(place if several else number) % len(COLORS)]
            dashes = [*DASHES][number % len(DASHES)] if several else "-"
            owner = f"{run.name}: {_label(name)}" if len(names) > 1 else run.name
            label = shown(owner if several else _label(name))
            artist = _draw_line(axes, panel, run, name, dashes, color)
            lines.append(Line(run, name, label, color, dashes, artist))
    _scale(axes, panel, [value for line in lines for value in series(line.run, line.name)[1]])
    if panel.names[0] == "eval/accuracy" and len(runs) == 1 and warm_start(runs[0]):
        axes.axvline(0, color="#8b95a3", linewidth=0.8, linestyle=":")
        axes.text(0, 1, f" {AFTER_WARM_START}", color="#8b95a3", fontsize=8, va="top",
                  transform=axes.get_xaxis_transform())  # fmt: skip
    axes.set_xlabel("step")
    size = 10 if len(panel.label) <= 36 else 6.5
    axes.set_ylabel(shown(panel.label), parse_math=False, fontsize=size)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2, linewidth=0.6)
    return lines


def _scale(axes: Any, panel: Panel, values: list[float]) -> None:
    """Set the limits of the axes and the numbers at them, each of which stands for itself."""
    if panel.logarithmic and all(value > 0 for value in values):
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(_of_powers())
        axes.yaxis.set_minor_formatter(_of_powers())
    else:  # no number in the corner that is to be added to the others, or multiplied with them
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:.10g}")
    axes.xaxis.set_major_formatter(lambda step, _: f"{step:.16g}")
    axes.xaxis.get_major_locator().set_params(integer=True)
    if panel.names[0] == "eval/accuracy":
        axes.set_ylim(0, None)
    if panel.names[0].startswith("time/"):
        # Otherwise one slow step would flatten the curves.
        values = sorted(values)
        axes.set_ylim(0, 1.5 * values[int(0.98 * (len(values) - 1))] or None)


def _of_powers() -> Any:
    """Return what writes numbers at a logarithmic axis, where there is room for them."""
    from matplotlib.ticker import LogFormatter

    class Plain(LogFormatter):
        def __call__(self, value: float, position: int | None = None) -> str:
            return f"{value:.10g}" if super().__call__(value, position) else ""

    return Plain()


def _draw_line(axes: Any, panel: Panel, run: Run, name: str, dashes: str, color: str) -> Any:
    """Draw a metric and return its line; a noisy one has its average drawn over faint points."""
    steps, values = series(run, name)
    noisy = len(values) > 20 and panel.smooth
    if name in run.bands:
        ends = [smooth(each) if noisy else each for each in run.bands[name]]
        few = slice(None, None, math.ceil(len(steps) / _MOST_POINTS))
        lows, highs = (each[few] for each in ends)
        axes.fill_between(steps[few], lows, highs, color=color, alpha=0.13, linewidth=0)
        values = smooth(values) if noisy else values
        return axes.plot(*thin(steps, values), dashes, color=color, linewidth=1.6)[0]
    if name == "eval/accuracy":
        steps, values = thin(steps, values)
        found = intervals(run)
        banded = [step for step in steps if step in found]
        lows, highs = ([found[step][end] for step in banded] for end in (0, 1))
        axes.fill_between(banded, lows, highs, color=color, alpha=0.13, linewidth=0)
        return axes.plot(steps, values, dashes, color=color, marker="o", markersize=3.5)[0]
    if not noisy:
        return axes.plot(*thin(steps, values), dashes, color=color)[0]
    axes.plot(*thin(steps, values), color=color, alpha=0.2, linewidth=0.8)
    return axes.plot(*thin(steps, smooth(values)), dashes, color=color, linewidth=1.6)[0]


def intervals(run: Run) -> dict[int, tuple[float, float]]:
    """Return the 95% intervals of the held-out accuracy by step; none if one of them has none."""
    rows = [row for row in run.rows if row.get("eval/accuracy") is not None]
    found = {row["step"]: interval_of(row) for row in rows}
    known = {step: ends for step, ends in found.items() if ends is not None}
    return known if len(known) == len(found) else {}


def warm_start(run: Run) -> tuple[int, float, float] | None:
    """Return the supervised steps before step 0, the accuracy after them and their seconds."""
    for row in run.rows:
        steps, accuracy = row.get("warm_start/steps"), row.get("warm_start/accuracy")
        if steps is not None and accuracy is not None:
            return round(steps), accuracy, row.get("time/warm_start") or 0.0
    return None


def shown(label: str) -> str:
    """Return a name as a label: one line, without control characters, not too long."""
    return escaped(label.replace("\n", " ")[:_LONGEST_LABEL])


def _names(run: Run, panel: Panel) -> list[str]:
    """Return the panel's metrics that the run has, in order."""
    known = run.metrics
    found = []
    for name in panel.names:
        if name == "eval/rewards/":  # the accuracy is the mean of the same reward
            found += [] if "eval/accuracy" in known else held_out_rewards(known)[:MOST_LINES]
        elif name.endswith("/"):
            found += rewards(known)[:MOST_LINES]
        elif name in known:
            found.append(name)
    return found


def rewards(names: Iterable[str]) -> list[str]:
    """Return the metrics that are means of rewards."""
    return [each for each in names if each.startswith("rewards/") and each.endswith("/mean")]


def held_out_rewards(names: Iterable[str]) -> list[str]:
    """Return the metrics that are means of rewards over held-out prompts."""
    return [each for each in names if is_held_out_reward(each)]


def _label(name: str) -> str:
    if name == "eval/accuracy":
        return "accuracy (held out)"
    if is_held_out_reward(name):
        return f"{reward_of(name)} (held out)"
    outer, _, inner = name.rpartition("/")
    shown = inner if outer in ("completions", "time") else name.removeprefix("rewards/")
    if outer.startswith("sampling"):
        shown = inner  # the axis has the rest as its label
    return shown.replace("/mean", "").replace("_", " ")
