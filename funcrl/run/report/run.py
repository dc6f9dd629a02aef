"""Reads a run's folder for a report, and lays out its tables."""

import html
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from funcrl.core.files import brief, read_yaml
from funcrl.core.printing import escaped
from funcrl.run import runs
from funcrl.run.folder import shown_change
from funcrl.run.report.plots import Run, shown
from funcrl.run.runs import COMPLETIONS

_MOST_ROWS, _MOST_NAMES = 1_000_000, 1000
_LARGEST = 1e100  # a number that can still be added up and drawn
_TEXTS = ("prompt", "completion", "answer", "finish_reason")
_LONGEST_TEXTS = (20_000, 5000, 2000, 1000, 500, 200, 100)  # in characters: the longest that fits
_MOST_TEXT = 500_000  # of all completions that are listed, in characters
_MOST_LISTED = 5000  # completions
_MOST_REWARDS = 40  # names of rewards in completions
_MOST_COLUMNS = 8  # that reward functions have logged of completions
_MOST_TOKENS = 1000  # of a completion whose tokens are shown one by one
_MOST_COLOURED = 5  # such completions
_LONGEST_TOKEN = 40


def read_run(folder: Path) -> Run:
    """Return the content of a run's folder; only its metrics are required."""
    if not (folder / runs.METRICS).exists():
        raise FileNotFoundError(
            f"report expects the folder of a run, got {folder} without a {runs.METRICS}."
        )
    rows = _metrics(folder / runs.METRICS)
    count, completions = _completions(folder / runs.COMPLETIONS)
    return Run(
        name=folder.resolve().name,
        folder=folder,
        rows=rows,
        metrics=_by_name(rows),
        completions=completions,
        num_completions=count,
        config=_config(folder / runs.CONFIG),
        environment=dict(runs.read_facts(folder, "report")),
    )


def _config(path: Path) -> dict[str, Any]:
    config = read_yaml("report", path) if path.exists() else None
    if not isinstance(config, dict | None):
        raise ValueError(f"report expects options in {path}, got {type(config).__name__}.")
    return config or {}


def _metrics(path: Path) -> list[dict[str, Any]]:
    """Return the rows of numbers; one that is not finite counts as none."""
    rows, names = [], set[str]()
    for number, row in _rows(path):
        runs.step_of("report", path, number, row)
        names |= row.keys()
        if len(names) > _MOST_NAMES:
            raise ValueError(
                f"report expects at most {_MOST_NAMES} metrics, got another one in line {number} "
                f"of {path}."
            )
        rows.append({name: _number(path, number, name, row[name]) for name in row})
    return rows


def _by_name(rows: list[dict[str, Any]]) -> dict[str, tuple[list[int], list[float]]]:
    """Return of each metric that has a value somewhere the steps and the values."""
    found: dict[str, tuple[list[int], list[float]]] = {}
    for row in rows:
        for name, value in row.items():
            if value is not None:
                steps, values = found.setdefault(name, ([], []))
                steps.append(row["step"])
                values.append(value)
    return found


def _completions(path: Path) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of completions, and those to list: all, or the first of each step."""
    lengths, rewards = [], set[str]()
    firsts, in_tokens, last_step = list[int](), list[int](), None
    for number, row in _rows(path):
        _check_completion(path, number, row)
        rewards |= row["rewards"].keys()
        if len(rewards) > _MOST_REWARDS:
            raise ValueError(
                f"report expects at most {_MOST_REWARDS} rewards, got another one in line {number} "
                f"of {path}."
            )
        lengths.append([*(len(row[name]) for name in _TEXTS), *map(len, row["extra"].values())])
        if row["step"] != last_step:
            firsts.append(number)
            last_step = row["step"]
        if row.get("tokens"):
            in_tokens.append(number)
    last = max(len(in_tokens) - 1, 0)
    coloured = {in_tokens[round(last * part / (_MOST_COLOURED - 1))]
                for part in range(_MOST_COLOURED) if in_tokens}  # fmt: skip
    # Of too many, the first one of each step; of too many steps, some.
    lines: Sequence[int] = range(1, len(lengths) + 1) if len(lengths) <= _MOST_LISTED else firsts
    kept_lines = set(lines[:: math.ceil(len(lines) / _MOST_LISTED) or 1]) | coloured
    listed = [length for number in kept_lines for length in lengths[number - 1]]
    longest = next(
        (most for most in _LONGEST_TEXTS if sum(min(n, most) for n in listed) <= _MOST_TEXT),
        _LONGEST_TEXTS[-1],
    )
    found = []
    for number, row in _rows(path):
        if number in kept_lines:
            _check_completion(path, number, row)
            kept = {name: row[name] for name in ("step", "reward", "rewards", "advantage")}
            kept |= {name: _cut(row[name], longest) for name in _TEXTS}
            kept["extra"] = {name: _cut(text, longest) for name, text in row["extra"].items()}
            if number in coloured:
                kept |= {name: row[name] for name in ("logprobs", "trainer_logprobs")}
                kept["tokens"] = [_cut(token, _LONGEST_TOKEN) for token in row["tokens"]]
            found.append(kept)
    return len(lengths), found


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, row in runs.each_line("report", path):
        if number > _MOST_ROWS:
            raise ValueError(f"report expects at most {_MOST_ROWS} lines in {path}, got more.")
        yield number, row


def _check_completion(path: Path, number: int, row: dict[str, Any]) -> None:
    runs.step_of("report", path, number, row)
    for name in _TEXTS:
        if not isinstance(row.get(name), str):
            raise ValueError(
                f"report expects {name} to be a text, got {brief(row.get(name))} in line {number} "
                f"of {path}."
            )
    for name in ("reward", "advantage"):
        row[name] = _number(path, number, name, row.get(name))
    for name in ("rewards", "extra"):
        if not isinstance(row.setdefault(name, {}), dict):
            raise ValueError(
                f"report expects {name} to be an object, got {brief(row[name])} in line {number} "
                f"of {path}."
            )
    rewards, extra = row["rewards"], islice(row["extra"].items(), _MOST_COLUMNS)
    row["rewards"] = {name: _number(path, number, name, rewards[name]) for name in rewards}
    row["extra"] = {name: str(value) for name, value in extra}
    _check_tokens(path, number, row)


def _check_tokens(path: Path, number: int, row: dict[str, Any]) -> None:
    """Raise if a completion's tokens are not texts with two numbers each."""
    tokens = row.get("tokens")
    if tokens is None:
        return
    size = len(tokens) if isinstance(tokens, list) else -1
    if not 0 <= size <= _MOST_TOKENS or not all(isinstance(token, str) for token in tokens):
        raise ValueError(
            f"report expects tokens to be at most {_MOST_TOKENS} texts, got {brief(tokens)} in "
            f"line {number} of {path}."
        )
    for name in ("logprobs", "trainer_logprobs"):
        values = row.get(name)
        if not isinstance(values, list) or len(values) != size:
            raise ValueError(
                f"report expects {name} to be {size} numbers, one of each token, got "
                f"{brief(values)} in line {number} of {path}."
            )
        row[name] = [_number(path, number, name, value) for value in values]


def _number(path: Path, number: int, name: str, value: Any) -> float | None:
    if value is None or (type(value) is float and not math.isfinite(value)):
        return None
    if type(value) not in (int, float) or abs(value) > _LARGEST:
        raise ValueError(
            f"report expects {brief(name)} to be a number of at most {_LARGEST:g}, or null, got "
            f"{brief(value)} in line {number} of {path}."
        )
    return value


def _cut(text: str, most: int) -> str:
    rest = len(text) - most
    return text if rest <= 0 else f"{text[:most]}... and {rest} characters more"


class Code(str):
    """Text that keeps its spaces and lines."""


def text(value: str) -> str:
    """Return a text for HTML, its control characters as escapes."""
    return html.escape(escaped(str(value), keep="\n"))


def plain(value: Any) -> str:
    """Return a value as people read it."""
    return f"{value:.4g}" if isinstance(value, float) else "-" if value is None else str(value)


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table that is scrolled sideways where it is too wide."""
    heads = "".join(f"<th>{text(name)}</th>" for name in head)
    body = "".join("<tr>" + "".join(map(_cell, row)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{heads}</tr>{body}</table></div>'


def strip(numbers: Mapping[str, str], intervals: Mapping[str, str]) -> str:
    """Return cards, each with a number, its name and its 95% interval if it has one."""
    cards = []
    for name, number in numbers.items():
        interval = text(intervals.get(name, ""))
        span, more = (' class="two"', f"<small>{interval}</small>") if interval else ("", "")
        label = f"{name}, 95% interval" if interval else name
        cards.append(f"<div{span}><b>{text(number)}</b>{more}<span>{text(label)}</span></div>")
    return f'<div class="strip">{"".join(cards)}</div>'


def data(name: str, value: Any) -> str:
    """Return a value for the page's script to read; no text in it can end the element."""
    shown = json.dumps(_escaped(value), ensure_ascii=False, separators=(",", ":"))
    shown = shown.replace("<", r"\u003c")
    return f'<script type="application/json" id="{name}">{shown}</script>'


def _escaped(value: Any) -> Any:
    if isinstance(value, str):
        return escaped(value, keep="\n")
    if isinstance(value, Mapping):
        return {_escaped(key): _escaped(inner) for key, inner in value.items()}
    return [_escaped(inner) for inner in value] if isinstance(value, list | tuple) else value


def _cell(value: str) -> str:
    if isinstance(value, Code):
        return f"<td><pre>{text(value)}</pre></td>"
    number = value[:1].isdigit() or value[:2].lstrip("-")[:1].isdigit()
    return f'<td class="n">{text(value)}</td>' if number else f"<td>{text(value)}</td>"


COLUMNS = ("from step", "option", "was", "is")
_MOST_COMPLETIONS = 1000


def change_rows(folder: Path) -> list[list[str]]:
    """Return a row of `COLUMNS` for each change that a run's folder records."""
    path = folder / runs.CHANGES
    lines = islice(runs.each_line("report", path), _MOST_COMPLETIONS)
    return [
        [
            str(runs.step_of("report", path, number, row) + 1),
            *shown_change(*(row.get(name) for name in ("option", "from", "to"))),
        ]
        for number, row in lines
    ]


_MOST_STILL = 12  # rows of the table that needs no script
_KEYS = """
<div class="keys">Colour of a token:
<label><input type="radio" name="colour" value="p" checked> how unlikely it was</label>
<label><input type="radio" name="colour" value="d"> difference of the trainer to the generator
</label></div>"""


def completions_section(run: Run) -> str:
    """Return the table that the page's script fills, with its filters, and the coloured tokens."""
    rows = run.completions
    if not rows:
        return f"<p>No {COMPLETIONS} here.</p>"
    rewards = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    has_advantage = any(row["advantage"] is not None for row in rows)
    columns = list(dict.fromkeys(name for row in rows for name in row["extra"]))[:_MOST_COLUMNS]
    texts = ["prompt", "completion", "answer", *map(shown, columns)]
    head = ["step", *texts, "reward", *map(shown, rewards)]
    head += [*(["advantage"] if has_advantage else []), "ended by"]
    cells = [
        [row["step"], row["prompt"], row["completion"], row["answer"],
         *(row["extra"].get(name, "") for name in columns), _shown_number(row["reward"]),
         *(_shown_number(row["rewards"].get(name)) for name in rewards),
         *([_shown_number(row["advantage"])] if has_advantage else []), row["finish_reason"]]
        for row in rows
    ]  # fmt: skip
    left_out = "" if len(rows) == run.num_completions else (
        f"<p>{len(rows):,} of the {run.num_completions:,} completions in {COMPLETIONS} are listed: "
        f"the first one of each step, or of some steps in a very long run.</p>"
    )  # fmt: skip
    return "\n".join([
        left_out,
        '<div id="completions"></div>',
        f"<noscript>{still_table(rows)}</noscript>",
        data("completions-data", {"head": head, "rows": cells, "texts": len(texts)}),
        coloured(rows),
    ])  # fmt: skip


def still_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the last completions as a table without a script."""
    cells = [
        [str(row["step"]), Code(row["prompt"]), Code(row["completion"]), Code(row["answer"]),
         plain(row["reward"]), row["finish_reason"]]
        for row in rows[-_MOST_STILL:]
    ]  # fmt: skip
    return table(["step", "prompt", "completion", "answer", "reward", "ended by"], cells)


def coloured(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tokens of those completions whose tokens are recorded, coloured."""
    rows = [row for row in rows if row.get("tokens")]
    if not rows:
        return ""
    pairs = [pair for row in rows for pair in zip(row["logprobs"], row["trainer_logprobs"],
                                                  strict=True)]  # fmt: skip
    largest = max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)
    blocks = [
        f"<p>step {row['step']}, reward {plain(row['reward'])}: {text(row['prompt'])}</p>"
        f'<div class="tokens">{_tokens(row, largest)}</div>'
        for row in rows
    ]
    legend = (
        "Point at a token for its numbers. No colour is certain, or no difference; the strongest "
        f"colour is a probability near 0, or the largest difference here, {plain(largest)}."
    )
    return "\n".join(["<h2>Tokens</h2>", _KEYS, *blocks, f"<p>{legend}</p>"])


def _tokens(row: dict[str, Any], largest: float) -> str:
    parts = []
    of_row = zip(row["tokens"], row["logprobs"], row["trainer_logprobs"], strict=True)
    for token, generator, trainer in of_row:
        unlikely, difference = 0.0, 0.0
        title = "not sampled" if generator is None else f"generator {plain(generator)}"
        if trainer is not None:
            title += f", trainer {plain(trainer)}"
            unlikely = 1 - math.exp(min(trainer, 0.0))
        if trainer is not None and generator is not None:
            title += f", difference {trainer - generator:.2g}"
            difference = abs(trainer - generator) / largest if largest else 0.0
        letters = escaped(token).replace(" ", "·") or "∅"
        parts.append(
            f'<span title="{text(title)}" style="--p:{unlikely:.2f};--d:{difference:.2f}">'
            f"{text(letters)}</span>"
        )
    return "".join(parts)


def _shown_number(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.5g}")
