"""Writes pieces of HTML; every text that comes from a run is escaped here."""

import html
import json
from collections.abc import Mapping, Sequence
from typing import Any

from funcrl.core.terminal import escaped


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
