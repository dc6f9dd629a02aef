"""Every Python block of every page runs, top to bottom; links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_code_runs(page):
    blocks = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_the_index_lists_every_page():
    index = (ROOT / "docs" / "index.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "index.md" or f"({page.name})" in index, page


def test_every_file_is_in_the_row_of_its_folder():
    page = (ROOT / "docs" / "contributing.md").read_text().partition("## Where things are")[2]
    lines = page.partition("\n## ")[0].splitlines()
    rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
    for path in (ROOT / "funcrl").rglob("*.py"):
        folder = path.parent.relative_to(ROOT / "funcrl")
        if folder != Path():
            assert f"{folder}/" in rows, folder
            assert path.name.startswith("_") or f"`{path.stem}`" in rows[f"{folder}/"], path


def test_the_lines_of_a_step_s_files_are_about_those_that_the_page_says():
    page = (ROOT / "docs" / "contributing.md").read_text().partition("## One step,")[2]
    rows = re.findall(r"^\| `(\S+\.py)` \| (\d+) \|", page, re.MULTILINE)
    assert len(rows) > 20
    for name, lines in rows:
        found = len((ROOT / "funcrl" / name).read_text().splitlines())
        assert int(lines) == pytest.approx(found, rel=0.1), f"{name} has {found} lines"
    total, files = re.search(r"\(([\d,]+) together, (\d+) files\)", page).groups()
    assert (int(total.replace(",", "")), int(files)) == (sum(int(n) for _, n in rows), len(rows))


def test_every_algorithm_is_in_the_table():
    import funcrl

    table = (ROOT / "docs" / "algorithms.md").read_text()
    for name in funcrl.__all__:
        value = getattr(funcrl, name)
        if getattr(value, "__module__", "") == "funcrl.rl.algorithms":
            assert f"`{name}()`" in table


def test_what_imports_vllm_or_triton_has_no_examples():
    """They would not run: pyproject.toml leaves these modules out."""
    folder, ops = ROOT / "funcrl/generators/vllm", ROOT / "funcrl/ops"
    kernels = [*ops.glob("*/cuda/*.py"), *ops.glob("*/cuda.py")]
    for path in (folder / "engine.py", *(folder / "plugin").glob("*.py"), *kernels):
        assert ">>>" not in path.read_text(), path
