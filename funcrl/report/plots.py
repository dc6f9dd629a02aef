"""Curves of one run or several: the same figures, a colour a run."""

import io
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# matplotlib takes a second to import, which only a report should pay.
COLORS = ["#3b6fb6", "#d9812b", "#3a9a6b", "#b04a7c", "#7a6bc4", "#8a6d3b"]
_SMOOTH = 0.9


class Run(NamedTuple):
    """A run read from its folder."""

    name: str
    folder: Path
    rows: list[dict[str, Any]]  # metrics.jsonl
    completions: list[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]


class Panel(NamedTuple):
    """One set of axes."""

    label: str  # of the vertical axis
    names: tuple[str, ...]  # metrics; ending in / for all that start so
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
    """Return the steps and the values of a metric, where it has one.

    Example:
        >>> import pathlib
        >>> from funcrl.report.plots import Run, series
        >>> rows = [{"step": 1, "kl": 0.5}, {"step": 2, "kl": None}, {"step": 3}]
        >>> series(Run("a", pathlib.Path("a"), rows, [], {}, {}), "kl")
        ([1], [0.5])
    """
    found = [(row["step"], row[name]) for row in run.rows if row.get(name) is not None]
    return [step for step, _ in found], [value for _, value in found]


def smooth(values: Sequence[float], keep: float = _SMOOTH) -> list[float]:
    """Return the exponential moving average, corrected for its start.

        m_t = keep m_{t-1} + (1 - keep) x_t,     shown as m_t / (1 - keep^t)

    Example:
        >>> from funcrl.report.plots import smooth
        >>> [round(value, 3) for value in smooth([1.0, 1.0, 0.0], keep=0.5)]
        [1.0, 1.0, 0.429]
    """
    shown, mean = [], 0.0
    for count, value in enumerate(values, start=1):
        mean = keep * mean + (1 - keep) * value
        shown.append(mean / (1 - keep**count))
    return shown


def draw(group: str, runs: Sequence[Run]) -> Any:
    """Return the figure of a group, None when no run has any of its metrics.

    Example:
        >>> import pathlib
        >>> from funcrl.report.plots import Run, draw
        >>> draw("Policy", [Run("a", pathlib.Path("a"), [{"step": 1}], [], {}, {})]) is None
        True
    """
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
    """Return a figure as SVG to put into a page; `salt` keeps its ids apart from others'.

    Example:
        >>> from matplotlib.figure import Figure
        >>> from funcrl.report.plots import to_svg
        >>> to_svg(Figure(), "a")[:4]
        '<svg'
    """
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
    for number, (run, name) in enumerate(lines):
        steps, values = series(run, name)
        several = len(runs) > 1
        color = COLORS[(list(runs).index(run) if several else number) % len(COLORS)]
        plain = run.name.replace("$", r"\$")  # or matplotlib would read it as mathematics
        label = _label(name) if not several else f"{plain}: {_label(name)}"
        dashes = "-" if not several else ("-", "--", ":", "-.")[_names(run, panel).index(name) % 4]
        if name == "eval/accuracy":
            axes.plot(steps, values, dashes, color=color, label=label, marker="o", markersize=3.5)
        elif len(values) > 20:
            axes.plot(steps, values, color=color, alpha=0.2, linewidth=0.8)
            axes.plot(steps, smooth(values), dashes, color=color, label=label, linewidth=1.6)
        else:
            axes.plot(steps, values, dashes, color=color, label=label)
    if panel.logarithmic and all(
        value > 0 for run, name in lines for value in series(run, name)[1]
    ):
        axes.set_yscale("log")
    if panel.names[0] == "eval/accuracy":
        axes.set_ylim(0, None)
    if panel.names[0].startswith("time/"):
        # One slow moment of the machine would flatten all the rest.
        values = sorted(value for run, name in lines for value in series(run, name)[1])
        axes.set_ylim(0, 1.5 * values[int(0.98 * (len(values) - 1))] or None)
    axes.set_xlabel("step")
    axes.set_ylabel(panel.label)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.2, linewidth=0.6)
    if len(lines) > 1:
        axes.legend(frameon=False, fontsize=8)


def _names(run: Run, panel: Panel) -> list[str]:
    """Return the panel's metrics that the run has, in order."""
    known = dict.fromkeys(name for row in run.rows for name in row if row[name] is not None)
    found = []
    for name in panel.names:
        if name.endswith("/"):
            found += [each for each in known if each.startswith(name) and each.endswith("/mean")]
        elif name in known:
            found.append(name)
    return found


def _label(name: str) -> str:
    if name == "eval/accuracy":
        return "accuracy (held out)"
    outer, _, inner = name.rpartition("/")
    shown = inner if outer in ("completions", "time") else name.removeprefix("rewards/")
    if outer.startswith("sampling"):
        shown = inner  # the axis says of what
    return shown.replace("/mean", "").replace("_", " ")
