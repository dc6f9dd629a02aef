"""Docstrings, which are Markdown with Google's sections, as parts that a page can be made of."""

import inspect
import re
import textwrap
from typing import NamedTuple

SECTION = re.compile(r"(Args|Returns|Example):")
ARGUMENT = re.compile(r"(\*{0,2}\w+): ?(.*)")


class Part(NamedTuple):
    """A piece of a docstring: its kind is "Args", "Returns", "Example" or "" for prose."""

    kind: str
    text: str  # without the heading, dedented


def parts_of(docstring: str | None) -> list[Part]:
    """Return the parts of a docstring in its order.

    A section ends at the first line that is not indented.
    """
    parts = []
    kind, lines = "", []
    for line in inspect.cleandoc(docstring or "").splitlines():
        heading = SECTION.fullmatch(line.rstrip())
        if heading or (kind and line and not line.startswith(" ")):
            parts.append((kind, lines))
            kind, lines = (heading[1], []) if heading else ("", [line])
        else:
            lines.append(line)
    texts = [
        (kind, textwrap.dedent("\n".join(lines)).strip("\n"))
        for kind, lines in [*parts, (kind, lines)]
    ]
    return [Part(kind, fenced(text) if kind != "Args" else text) for kind, text in texts if text]


def arguments_of(text: str) -> list[tuple[str, str]]:
    """Return the name and the description of each argument in a section "Args"."""
    found: list[tuple[str, list[str]]] = []
    for line in text.splitlines():
        entry = ARGUMENT.fullmatch(line)
        if entry:
            found.append((entry[1].lstrip("*"), [entry[2]]))
        elif line.strip():
            found[-1][1].append(line.strip())
    return [(name, " ".join(lines)) for name, lines in found]


def arguments_in(docstring: str | None) -> list[tuple[str, str]]:
    """Return the name and the description of each argument that a docstring describes."""
    sections = [part.text for part in parts_of(docstring) if part.kind == "Args"]
    return [pair for text in sections for pair in arguments_of(text)]


def fenced(text: str) -> str:
    """Return Markdown whose interactive examples stand in fences, so that they are coloured."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\n+", text):
        if paragraph.lstrip().startswith(">>>"):
            paragraph = f"```pycon\n{textwrap.dedent(paragraph)}\n```"
        lines.append(paragraph)
    return "\n\n".join(lines)


def outside_code(pattern: re.Pattern[str], replace, text: str) -> str:
    """Return Markdown in which a pattern is replaced, but for lines of code."""
    lines, inside = [], False
    for line in text.splitlines():
        fence = line.startswith("```")
        inside ^= fence
        plain = not (inside or fence or line.startswith("    "))
        lines.append(pattern.sub(replace, line) if plain else line)
    return "\n".join(lines)
