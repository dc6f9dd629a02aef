"""Writes the page: one HTML file that needs no other, for light and dark, wide and narrow."""

import html
import io
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funcrl.core.files import whole_file
from funcrl.core.terminal import escaped
from funcrl.run.report.changes import COLUMNS, change_rows
from funcrl.run.report.plots import GROUPS, MOST_LINES, Run, draw, rewards, series, to_svg
from funcrl.run.report.run import read_run
from funcrl.run.runs import COMPLETIONS, CONFIG, ENVIRONMENT

_STYLE = """
:root { --ink: #1c2430; --soft: #5d6878; --line: #dfe3e9; --page: #fff; --card: #f6f7f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --soft: #9aa5b4; --line: #343b46; --page: #14181e; --card: #1d232b; }
  svg text { fill: #c6cdd7 !important; } svg path[style*="stroke: #000000"],
  svg use[style*="stroke: #000000"] { stroke: #8b95a3 !important; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 70rem; color: var(--ink);
  background: var(--page); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p { color: var(--soft); margin: .2rem 0; }
.strip { display: flex; flex-wrap: wrap; gap: .8rem; margin: 1.2rem 0; }
.strip div { background: var(--card); border-radius: .5rem; padding: .6rem 1rem; flex: 1 1 8rem; }
.strip b { display: block; font-size: 1.25rem; white-space: nowrap; }
.strip span { color: var(--soft); font-size: .85rem; }
figure { margin: 0; overflow-x: auto; } figure svg { max-width: 100%; height: auto; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; }
td, th { text-align: left; padding: .3rem .9rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; } th { color: var(--soft); font-weight: 500; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
pre { font: .85rem/1.45 ui-monospace, monospace; white-space: pre-wrap; margin: 0;
  overflow-wrap: anywhere; }
details { margin: .6rem 0; } summary { cursor: pointer; }
"""


def write_report(run: Path) -> Path:
    """Write RUN/report.html and RUN/plots/*.png, and return the page's path."""
    read = read_run(run)
    subject = " · ".join(
        str(read.config[name]) for name in ("task", "model") if name in read.config
    )
    changes = change_rows(run)
    parts = [
        f"<h1>{_text(read.name)}</h1><p>{_text(subject)}</p>",
        _strip(headline(read)),
        _curves([read], run / "plots"),
        "<h2>Completions</h2>", _completions(read.completions),
        "<h2>Time</h2>", _timings(read),
        *(["<h2>Changes</h2>", _table(COLUMNS, changes)] if changes else []),
        "<h2>Configuration</h2>", _facts(flat(read.config), CONFIG),
        "<h2>Environment</h2>", _facts(read.environment, ENVIRONMENT),
    ]  # fmt: skip
    return _write(run / "report.html", read.name, parts)


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write out/report.html and out/plots/*.png about several runs, and return the page's path."""
    if len(runs) < 2:
        raise ValueError(f"write_comparison expects at least two runs, got {len(runs)}.")
    read = _uniquely_named([read_run(run) for run in runs])
    numbers = [headline(run) for run in read]
    columns = list(dict.fromkeys(name for row in numbers for name in row))
    table = [[run.name, *(row.get(name, "") for name in columns)]
             for run, row in zip(read, numbers, strict=True)]  # fmt: skip
    options = [flat(run.config) for run in read]
    names = dict.fromkeys(name for option in options for name in option)
    different = [
        [name, *(_plain(option.get(name, "")) for option in options)]
        for name in names
        if len({repr(option.get(name)) for option in options}) > 1
    ]
    parts = [
        f"<h1>{len(read)} runs compared</h1>",
        "<h2>Numbers</h2>", _table(["run", *columns], table),
        _curves(read, out / "plots"),
        "<h2>Options that differ</h2>",
        _table(["option", *(run.name for run in read)], different) if different
        else "<p>None: the configurations are equal.</p>",
    ]  # fmt: skip
    return _write(out / "report.html", "Comparison", parts)


def headline(run: Run) -> dict[str, str]:
    """Return the numbers at the top of the page."""
    numbers: dict[str, str] = {}
    for label, name in (("held-out accuracy", "eval/accuracy"), ("reward", "reward")):
        _, values = series(run, name)
        if values:
            numbers[label] = f"{_plain(values[0])} → {_plain(values[-1])}"
            if name == "eval/accuracy":
                numbers["best accuracy"] = _plain(max(values))
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


def _write(path: Path, title: str, parts: Sequence[str]) -> Path:
    head = (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{_text(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{_STYLE}</style></head><body>"
    )
    text = "\n".join([head, *parts, "</body></html>"])
    _save(path, text.encode(errors="backslashreplace"))
    return path


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


def _curves(runs: Sequence[Run], folder: Path) -> str:
    folder, parts = _plots_folder(folder), []
    for group in GROUPS:
        figure = draw(group, runs)
        if figure is None:
            continue
        name = group.lower().replace(" ", "_")
        png = io.BytesIO()
        figure.savefig(png, format="png", dpi=150)
        _save(folder / f"{name}.png", png.getvalue())
        parts.append(f"<h2>{group}</h2><figure>{to_svg(figure, name)}</figure>")
    if not parts:
        return "<h2>Curves</h2><p>No step has been logged yet.</p>"
    for run in runs:
        count = len(rewards(dict.fromkeys(name for row in run.rows for name in row)))
        if count > MOST_LINES:
            parts.append(
                f"<p>{MOST_LINES} of the {count} rewards of {_text(run.name)} are drawn.</p>"
            )
    return "\n".join([*parts, "<p>Faint lines are the steps; strong ones their exponential moving "
                      "average over about ten.</p>"])  # fmt: skip


def _completions(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return f"<p>No {COMPLETIONS} here.</p>"
    table = [
        [str(row["step"]), _Code(row["prompt"]), _Code(row["completion"]), _Code(row["answer"]),
         _plain(row["reward"]), row["finish_reason"]]
        for row in rows
    ]  # fmt: skip
    return _table(["step", "prompt", "completion", "answer", "reward", "ended by"], table)


def _timings(run: Run) -> str:
    _, whole = series(run, "step_time")
    if not whole:
        return "<p>No step has been timed yet.</p>"
    table = []
    for name in ("step_time", "time/generate", "time/reward", "time/train", "time/push"):
        _, values = series(run, name)
        if values:
            ordered = sorted(values)
            tail = ordered[min(int(0.9 * len(ordered)), len(ordered) - 1)]
            share = f"{100 * sum(values) / sum(whole):.0f}%" if sum(whole) else "-"
            cells = [f"{1e3 * statistics.median(values):.1f}", f"{1e3 * tail:.1f}", share]
            table.append([name.removeprefix("time/").replace("_", " "), *cells])
    return _table(["part of a step", "median ms", "90th percentile ms", "share"], table)


def _facts(facts: Mapping[str, Any], source: str) -> str:
    if not facts:
        return f"<p>No {source} here.</p>"
    rows = [[name, _Code(_plain(value))] for name, value in facts.items()]
    return f"<details><summary>{source}</summary>{_table(['name', 'value'], rows)}</details>"


class _Code(str):
    """Text that keeps its spaces and lines."""


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    heads = "".join(f"<th>{_text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{heads}</tr>{body}</table></div>'


def _cell(value: str) -> str:
    if isinstance(value, _Code):
        return f"<td><pre>{_text(value)}</pre></td>"
    number = value[:1].isdigit() or value[:2].lstrip("-")[:1].isdigit()
    return f'<td class="n">{_text(value)}</td>' if number else f"<td>{_text(value)}</td>"


def _strip(numbers: Mapping[str, str]) -> str:
    cells = "".join(f"<div><b>{_text(v)}</b><span>{_text(k)}</span></div>"
                    for k, v in numbers.items())  # fmt: skip
    return f'<div class="strip">{cells}</div>'


def _uniquely_named(runs: list[Run]) -> list[Run]:
    names = [run.name for run in runs]
    return [
        run._replace(name=f"{run.name} ({number})") if names.count(run.name) > 1 else run
        for number, run in enumerate(runs, start=1)
    ]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes else f"{rest} s"


def _plain(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def _text(value: str) -> str:
    return html.escape(escaped(str(value), keep="\n"))
