"""Every Python block of every page runs, top to bottom; links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_module_is_in_the_tour():
    tour = (ROOT / "docs" / "all-of-funcrl.md").read_text()
    for path in (ROOT / "funcrl").iterdir():
        name = path.name.removesuffix(".py")
        if not name.startswith("_") and path.name != "py.typed":
            assert f"`{name}" in tour, name


def test_every_algorithm_is_in_the_table():
    import funcrl

    table = (ROOT / "docs" / "algorithms.md").read_text()
    for name in funcrl.__all__:
        value = getattr(funcrl, name)
        if getattr(value, "__module__", "") == "funcrl.algorithms":
            assert f"`{name}()`" in table
