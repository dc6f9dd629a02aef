"""Writes the page: one HTML file that needs no other, for light and dark, wide and narrow."""

import base64
import hashlib
import html
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funcrl.core.files import whole_file
from funcrl.run.accuracy import reward_of
from funcrl.run.report import completions, curves
from funcrl.run.report.completions import COLUMNS, change_rows
from funcrl.run.report.markup import Code, plain, strip, table, text
from funcrl.run.report.plots import Run, held_out_rewards, intervals, series, warm_start
from funcrl.run.report.run import read_run
from funcrl.run.runs import CONFIG, ENVIRONMENT

_HERE = Path(__file__).parent
_MAIN = ("Learning curve", "Policy")  # groups of curves


def write_report(run: str | Path) -> Path:
    """Write RUN/report.html and RUN/plots/*.png, and return the page's path."""
    run = Path(run)
    read = read_run(run)
    subject = " · ".join(
        str(read.config[name]) for name in ("task", "model") if name in read.config
    )
    changes = change_rows(run)
    parts = [
        f"<h1>{text(read.name)}</h1><p>{text(subject)}</p>",
        strip(headline(read)), _warm_start(read),
        curves.section([read], _saver(run / "plots")),
        "<h2>Completions</h2>", completions.section(read),
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
    out = Path(out)
    numbers = [headline(run) for run in read]
    columns = list(dict.fromkeys(name for row in numbers for name in row))
    cells = [[run.name, *(row.get(name, "") for name in columns)]
             for run, row in zip(read, numbers, strict=True)]  # fmt: skip
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
        curves.section(read, _saver(out / "plots")),
        "<h2>Options that differ</h2>",
        table(["option", *(run.name for run in read)], different) if different
        else "<p>None: the configurations are equal.</p>",
    ]  # fmt: skip
    return _write(out / "report.html", "Comparison", parts)


def headline(run: Run) -> dict[str, str]:
    """Return the numbers at the top of the page."""
    numbers: dict[str, str] = {}
    of_rewards = [] if "eval/accuracy" in run.metrics else held_out_rewards(run.metrics)
    evaluated = [(f"held-out {reward_of(name)}", name) for name in of_rewards]
    for label, name in (
        ("held-out accuracy", "eval/accuracy"), *evaluated, ("reward", "reward"),
    ):  # fmt: skip
        _, values = series(run, name)
        if values:
            numbers[label] = f"{plain(values[0])} → {plain(values[-1])}"
            if name == "eval/accuracy":
                if ends := [*intervals(run).values()]:
                    numbers["95% intervals"] = f"{_range(ends[0])} → {_range(ends[-1])}"
                numbers["best accuracy"] = plain(max(values))
    if warmed := warm_start(run):
        numbers["accuracy of the warm start"] = plain(warmed[1])
    if run.rows:
        numbers["steps"] = str(run.rows[-1]["step"])
    seconds = sum(sum(series(run, name)[1]) for name in
                  ("step_time", "time/eval", "time/warm_start", "time/startup"))  # fmt: skip
    if seconds:
        numbers["time"] = _duration(seconds)
    tokens, step_time = sum(series(run, "num_tokens")[1]), sum(series(run, "step_time")[1])
    if tokens and step_time:
        numbers["trained tokens"] = f"{tokens:,.0f}"
        numbers["tokens/s"] = f"{tokens / step_time:,.0f}"
    return numbers


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
        strip(headline(read)), _warm_start(read),
        curves.section([read], only=_MAIN), completions.section(read),
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


def _saver(folder: Path) -> curves.SavePicture:
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
        f"<p>Warm start: accuracy {plain(accuracy)} after {steps:,} supervised steps, "
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


def _range(ends: tuple[float, float]) -> str:
    return " to ".join(f"{end:.2f}" for end in ends)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"
