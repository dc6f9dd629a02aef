"""The example scripts on a page of the site: ```{scripts}``` becomes their README and code."""

import ast
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
BLOCK = re.compile(r"^```\{scripts\}\n```$", re.MULTILINE)
SCRIPT = re.compile(r"\]\((\w+)\.py\)")
LINK = re.compile(r"\]\((?:\.\./)+examples/(?:README\.md|(\w+)\.py|)\)")


def anchor_of(name: str) -> str:
    """Return the anchor of a script's heading."""
    return f"{name}py"


def all_scripts() -> str:
    """Return the folder's README, and each script in its order: its name, docstring and code."""
    _, readme = (EXAMPLES / "README.md").read_text().split("\n", 1)
    pieces = [SCRIPT.sub(lambda match: f"](#{anchor_of(match[1])})", readme).strip()]
    order = dict.fromkeys(SCRIPT.findall(readme))
    for name in order | dict.fromkeys(sorted(path.stem for path in EXAMPLES.glob("*.py"))):
        text = (EXAMPLES / f"{name}.py").read_text()
        module = ast.parse(text)
        code = "".join(text.splitlines(keepends=True)[module.body[0].end_lineno :]).strip()
        pieces += [f"## {name}.py", ast.get_docstring(module), f"```python\n{code}\n```"]
    return "\n\n".join(pieces).replace("](../docs/", "](")


def expand(text: str, docname: str) -> str:
    """Return a page with the scripts written out, and links to them that lead to their page."""

    def link(match: re.Match[str]) -> str:
        anchor = f"#{anchor_of(match[1])}" if match[1] else ""
        return f"]({'../' * docname.count('/')}examples.md{anchor})"

    return LINK.sub(link, BLOCK.sub(lambda _: all_scripts(), text))


def expand_source(app, docname: str, source: list[str]) -> None:
    """Write out the scripts before Sphinx reads the page."""
    del app
    source[0] = expand(source[0], docname)


def setup(app) -> dict[str, bool]:
    """Register with Sphinx."""
    app.connect("source-read", expand_source)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
