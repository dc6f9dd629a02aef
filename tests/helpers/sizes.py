"""The sizes of the package, as a table for docs/contributing.md: `python tests/helpers/sizes.py`.

Long files and functions are signals for a reader, not errors.
"""

import ast
import io
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[2] / "funcrl"
NOT_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER, tokenize.ENCODING,
)  # fmt: skip


class Unit(NamedTuple):
    """A function or a class, and the number of its lines without its docstring."""

    name: str
    is_class: bool
    lines: int


def docstring_lines(tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that docstrings take, those of a dataclass's fields too."""
    strings = [
        node for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]  # fmt: skip
    return {line for node in strings for line in range(node.lineno, node.end_lineno + 1)}


def code_lines(source: str) -> int:
    """Return the number of lines that hold code: no blank line, comment or docstring."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {
        line for token in tokens if token.type not in NOT_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }  # fmt: skip
    return len(lines - docstring_lines(ast.parse(source)))


def units(path: Path) -> Iterator[Unit]:
    """Yield the functions and classes of a file."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            lines = node.end_lineno - node.lineno + 1 - len(docstring_lines(node))
            yield Unit(f"`{path.stem}.{node.name}`", isinstance(node, ast.ClassDef), lines)


def main() -> None:
    """Print the table, and then what is longer than most."""
    print("| folder | files | lines | of code |\n|---|---|---|---|")
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    total = [0, 0, 0]
    for folder in sorted(folders):
        sources = [path.read_text() for path in folder.glob("*.py")]
        row = [len(sources), sum(s.count("\n") for s in sources), sum(map(code_lines, sources))]
        total = [a + b for a, b in zip(total, row, strict=True)]
        name = folder.relative_to(PACKAGE.parent)
        print(f"| `{name}/` | " + " | ".join(f"{n:,}" for n in row) + " |")
    print("| in all | " + " | ".join(f"{n:,}" for n in total) + " |\n")
    files = {p: p.read_text().count("\n") for p in PACKAGE.rglob("*.py")}
    every = [unit for path in files for unit in units(path)]
    long = {
        "Files above 300 lines": {
            f"`{p.relative_to(PACKAGE)}`": n for p, n in files.items() if n > 300
        },
        "Functions above 60 lines": {
            u.name: u.lines for u in every if not u.is_class and u.lines > 60
        },
        "Classes above 120 lines": {u.name: u.lines for u in every if u.is_class and u.lines > 120},
    }
    for title, found in long.items():
        ordered = sorted(found.items(), key=lambda item: -item[1])
        print(f"{title}: " + (", ".join(f"{name} ({n})" for name, n in ordered) or "none") + ".\n")


if __name__ == "__main__":
    main()
