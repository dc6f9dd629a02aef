"""Writes the page: one HTML file that needs no other, for light and dark, wide and narrow."""

import base64
import hashlib
import html
import io
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from funcrl.core.files import whole_file
from funcrl.run.accuracy import reward_of
from funcrl.run.report.plots import (
    AFTER_WARM_START,
    DASHES,
    MOST_LINES,
    MOST_OTHERS,
    NARROW,
    OTHERS,
    WIDE,
    Drawn,
    Line,
    Panel,
    Run,
    constants,
    draw,
    draw_one,
    groups,
    held_out_rewards,
    intervals,
    rewards,
    series,
    shown,
    thin,
    warm_start,
)
from funcrl.run.report.run import (
    COLUMNS,
    Code,
    change_rows,
    completions_section,
    data,
    plain,
    read_run,
    strip,
    table,
    text,
)
from funcrl.run.report.seeds import of_seeds, spread_of
from funcrl.run.runs import CONFIG, ENVIRONMENT
from funcrl.weights.sources import known_name

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
        # The first group is as wide as the page, where the page is wide.
        sizes = {"narrow": NARROW, "whole": WIDE} if group == _MAIN[0] else {"": NARROW}
        for number, panel in enumerate(panels):
            for kind, size in sizes.items():
                one = draw_one(panel, runs, f"{name}_{number}{kind}", size)
                figures.append(
                    f'<figure class="{kind}" data-panel="{len(values)}">{_names_of(one.lines)}'
                    f'<div class="picture">{one.svg}</div></figure>'
                )
                values.append(_for_the_pointer(one, runs, most))
        parts += [f"<h2>{group}</h2>", f'<div class="curves">{"".join(figures)}</div>']
    parts += [f"<p>{line}</p>" for line in _remarks(runs, found)]
    return "\n".join([*parts, data("curves-data", values)])


def _names_of(lines: Sequence[Line]) -> str:
    """Return the names of several lines, each beside a piece of it."""
    if len(lines) < 2:
        return ""
    names = "".join(
        f'<span><svg viewBox="0 0 22 4"><path d="M0 2h22" stroke="{line.color}" stroke-width="3" '
        f'stroke-dasharray="{DASHES[line.dashes]}"/></svg>{text(line.label)}</span>'
        for line in lines
    )
    return f"<figcaption>{names}</figcaption>"


def _for_the_pointer(drawn: Drawn, runs: Sequence[Run], most_points: int) -> dict[str, Any]:
    lines = []
    for line in drawn.lines:
        steps, values = thin(*series(line.run, line.name), most_points)
        lines.append({"label": line.label, "color": line.color, "steps": steps,
                      "values": [float(f"{value:.5g}") for value in values]})  # fmt: skip
    zero = AFTER_WARM_START if any(warm_start(run) for run in runs) else ""
    return {"box": drawn.box, "x": drawn.horizontal, "zero": zero, "lines": lines}


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
    if any(run.bands for run in runs):
        lines.append("Curves of several seeds are their mean, and the band is one standard "
                     "deviation to both sides.")  # fmt: skip
    if any(map(intervals, runs)) and "Learning curve" in found:
        lines.append("The band around the accuracy is its 95% interval (Wilson's).")
    lines.append("Faint lines are the steps; strong ones their exponential moving average over "
                 "about ten. Point at a curve for its values.")  # fmt: skip
    return lines


_HERE = Path(__file__).parent
_MAIN = ("Learning curve", "Policy")  # groups of curves
_ACCURACY, _INTERVALS = "held-out accuracy", "95% intervals"  # of the numbers at the top
_MANY_PROMPTS = 300  # above which the third place of an accuracy says something


def write_report(run: str | Path) -> Path:
    """Write RUN/report.html and RUN/plots/*.png, and return the page's path."""
    run = Path(run)
    read = read_run(run)
    changes = change_rows(run)
    parts = [
        f"<h1>{text(read.name)}</h1><p>{text(_subject(read))}</p>",
        _cards(read), _warm_start(read),
        section([read], _saver(run / "plots")),
        "<h2>Completions</h2>", completions_section(read),
        "<h2>Time</h2>", _timings(read),
        *(["<h2>Changes</h2>", table(COLUMNS, changes)] if changes else []),
        "<h2>Configuration</h2>", _facts(flat(read.config), CONFIG),
        "<h2>Environment</h2>", _facts(read.environment, ENVIRONMENT),
    ]  # fmt: skip
    return _write(run / "report.html", read.name, parts)


def write_comparison(runs: Sequence[str | Path], out: str | Path) -> Path:
    """Write out/report.html and out/plots/*.png about several runs, and return the page's path."""
    if len(runs) < 2:
        raise ValueError(f"write_comparison expects at least two runs, got {len(runs)}.")
    read = _uniquely_named([read_run(Path(run)) for run in runs])
    out, shown = Path(out), of_seeds(read)
    listed = [*(run for run in shown if run not in read), *read]
    numbers = [headline(run) for run in listed]
    columns = list(dict.fromkeys(name for row in numbers for name in row))
    cells = [[run.name, *(row.get(name, "") for name in columns)]
             for run, row in zip(listed, numbers, strict=True)]  # fmt: skip
    options = [flat(run.config) for run in read]
    names = dict.fromkeys(name for option in options for name in option)
    different = [
        [name, *(plain(option.get(name, "")) for option in options)]
        for name in names
        if len({repr(option.get(name)) for option in options}) > 1
    ]
    parts = [
        f"<h1>{len(read)} runs compared</h1>",
        "<h2>Numbers</h2>", table(["run", *columns], cells),
        section(shown, _saver(out / "plots")),
        "<h2>Options that differ</h2>",
        table(["option", *(run.name for run in read)], different) if different
        else "<p>None: the configurations are equal.</p>",
    ]  # fmt: skip
    return _write(out / "report.html", "Comparison", parts)


def _subject(run: Run) -> str:
    """Return what was trained on what: the task, the model's name, and what it is."""
    task, model = run.config.get("task"), run.config.get("model")
    named = [task, known_name(str(model)) if model else None, run.environment.get("network")]
    return " · ".join(str(each) for each in named if each)


def _cards(run: Run) -> str:
    """Return the numbers at the top of the page, the interval with its accuracy."""
    numbers = headline(run)
    interval = {_ACCURACY: numbers.pop(_INTERVALS)} if _INTERVALS in numbers else {}
    return strip(numbers, interval)


def headline(run: Run) -> dict[str, str]:
    """Return the numbers at the top of the page."""
    numbers: dict[str, str] = {}
    _, prompts = series(run, "eval/num_prompts")
    places = 3 if prompts and min(prompts) > _MANY_PROMPTS else 2
    of_rewards = [] if "eval/accuracy" in run.metrics else held_out_rewards(run.metrics)
    evaluated = [(f"held-out {reward_of(name)}", name) for name in of_rewards]
    for label, name in (
        (_ACCURACY, "eval/accuracy"), *evaluated, ("reward", "reward"),
    ):  # fmt: skip
        _, values = series(run, name)
        if values:
            first, last = (_rounded(value, places) for value in (values[0], values[-1]))
            numbers[label] = f"{first} → {last}{spread_of(run, name)}"
            if name == "eval/accuracy":
                if ends := [*intervals(run).values()]:
                    ranges = (" to ".join(_rounded(end, places) for end in pair)
                              for pair in (ends[0], ends[-1]))  # fmt: skip
                    numbers[_INTERVALS] = " → ".join(ranges)
                numbers["best accuracy"] = _rounded(max(values), places)
    if run.rows:
        numbers["steps"] = str(run.rows[-1]["step"])
    seconds = sum(sum(series(run, name)[1]) for name in
                  ("step_time", "time/eval", "time/warm_start", "time/startup"))  # fmt: skip
    if seconds:
        numbers["time"] = _duration(seconds)
    tokens, step_time = sum(series(run, "num_tokens")[1]), sum(series(run, "step_time")[1])
    if tokens and step_time:
        numbers["trained tokens"] = f"{tokens:,.0f}"
        numbers["tokens a second"] = f"{tokens / step_time:,.0f}"
    return numbers


def _rounded(value: float, places: int) -> str:
    """Return a number with as many places as those beside it, unless it would be 0 with them."""
    shown = f"{value:,.{places}f}"
    return plain(value) if value and not float(shown.replace(",", "")) else shown


def flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Return nested options as `outer.inner` -> value."""
    options: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            options |= flat(value, f"{path}{name}.")
        else:
            options[f"{path}{name}"] = value
    return options


def to_frame(run: str | Path) -> str:
    """Return the main curves and the completions of a run as HTML for a notebook.

    They are in a frame of their own, whose style and script do not reach the notebook.
    """
    read = read_run(Path(run))
    parts = [
        _cards(read), _warm_start(read),
        section([read], only=_MAIN), completions_section(read),
    ]  # fmt: skip
    page = html.escape(_page(read.name, parts))
    size = 'style="width: 100%; height: 36rem; border: 0"'
    return f'<iframe sandbox="allow-scripts" {size} srcdoc="{page}"></iframe>'


def _write(path: Path, title: str, parts: Sequence[str]) -> Path:
    _save(path, _page(title, parts).encode(errors="backslashreplace"))
    return path


def _page(title: str, parts: Sequence[str]) -> str:
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    # The browser runs this script and no other, and fetches nothing, whatever a run has in it.
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{text(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head><body>"
    )
    return "\n".join([head, *parts, f"<script>{script}</script></body></html>"])


def _saver(folder: Path) -> SavePicture:
    """Return what saves a picture in a folder, which is made if it is missing."""
    folder = _plots_folder(folder)
    return lambda name, content: _save(folder / name, content)


def _warm_start(run: Run) -> str:
    """Return a sentence about the supervised steps before step 0, if there were any."""
    warmed = warm_start(run)
    if warmed is None:
        return ""
    steps, accuracy, seconds = warmed
    return (
        f"<p>Warm start: accuracy {_rounded(accuracy, 2)} after {steps:,} supervised steps, "
        f"{_duration(seconds)}. Step 0 of the curves is the policy after it.</p>"
    )


def _save(path: Path, content: bytes) -> None:
    """Write a file; a link in its place is replaced and not followed."""
    try:
        with whole_file(path) as file:
            file.write(content)
    except OSError as error:
        raise OSError(f"report expects to write {path}, got: {error.strerror}.") from error


def _plots_folder(folder: Path) -> Path:
    """Return the folder for pictures, made if it is missing; raise if it is a link or a file."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise OSError(f"report expects {folder} to be a folder, got a link or a file; remove it.")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"report expects to make {folder}, got: {error.strerror}.") from error
    return folder


def _timings(run: Run) -> str:
    _, whole = series(run, "step_time")
    if not whole:
        return "<p>No step has been timed yet.</p>"
    rows = []
    parts = ("generate", "reward", "wait", "train", "push")
    for name in ("step_time", *(f"time/{part}" for part in parts)):
        _, values = series(run, name)
        if values:
            ordered = sorted(values)
            tail = ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]
            share = f"{100 * sum(values) / sum(whole):.0f}%" if sum(whole) else "-"
            cells = [f"{1e3 * statistics.median(values):.1f}", f"{1e3 * tail:.1f}", share]
            rows.append([name.removeprefix("time/").replace("_", " "), *cells])
    return table(["part of a step", "median ms", "90th percentile ms", "share"], rows)


def _facts(facts: Mapping[str, Any], source: str) -> str:
    if not facts:
        return f"<p>No {source} here.</p>"
    rows = [[name, Code(plain(value))] for name, value in facts.items()]
    return f"<details><summary>{source}</summary>{table(['name', 'value'], rows)}</details>"


def _uniquely_named(runs: list[Run]) -> list[Run]:
    names = [run.name for run in runs]
    return [
        run._replace(name=f"{run.name} ({number})") if names.count(run.name) > 1 else run
        for number, run in enumerate(runs, start=1)
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
