"""Writes pieces of HTML; every text that comes from a run is escaped here."""

import html
import json
import math
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from funcrl.core.printing import escaped
from funcrl.run import runs
from funcrl.run.folder import shown_change
from funcrl.run.report.plots import Run, shown
from funcrl.run.runs import COMPLETIONS


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


def strip(numbers: Mapping[str, str]) -> str:
    """Return a row of cards, each a number and its name."""
    cells = "".join(f"<div><b>{text(v)}</b><span>{text(k)}</span></div>"
                    for k, v in numbers.items())  # fmt: skip
    return f'<div class="strip">{cells}</div>'


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
_MOST_ROWS = 1000


def change_rows(folder: Path) -> list[list[str]]:
    """Return a row of `COLUMNS` for each change that a run's folder records."""
    path = folder / runs.CHANGES
    lines = islice(runs.each_line("report", path), _MOST_ROWS)
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


def section(run: Run) -> str:
    """Return the table that the page's script fills, with its filters, and the coloured tokens."""
    rows = run.completions
    if not rows:
        return f"<p>No {COMPLETIONS} here.</p>"
    rewards = list(dict.fromkeys(name for row in rows for name in row["rewards"]))
    has_advantage = any(row["advantage"] is not None for row in rows)
    head = ["step", "prompt", "completion", "answer", "reward", *map(shown, rewards)]
    head += [*(["advantage"] if has_advantage else []), "ended by"]
    cells = [
        [row["step"], row["prompt"], row["completion"], row["answer"], _number(row["reward"]),
         *(_number(row["rewards"].get(name)) for name in rewards),
         *([_number(row["advantage"])] if has_advantage else []), row["finish_reason"]]
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
        data("completions-data", {"head": head, "rows": cells, "texts": 3}),
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


def _number(value: float | None) -> float | None:
    return value if value is None else float(f"{value:.5g}")
