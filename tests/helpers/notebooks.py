"""Run the notebooks of docs/notebooks and write their outputs anew, all or those that are named.

    python tests/helpers/notebooks.py
    python tests/helpers/notebooks.py first-step own-algorithm

A notebook runs from top to bottom in an empty folder. What would differ between two runs of the
same code, such as times and versions, is not written, so that a difference means something.
"""

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import nbclient
import nbformat

FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
BOOKS = sorted(FOLDER.glob("*.ipynb"))
Notebook = nbformat.NotebookNode


def read(path: Path) -> Notebook:
    return nbformat.read(path, as_version=4)


def code_cells(book: Notebook) -> list[Any]:
    return [cell for cell in book.cells if cell.cell_type == "code"]


def execute(path: Path, folder: Path, timeout: int = 300) -> Notebook:
    """Return the notebook with the outputs of a run in the folder; a cell that raises raises here.

    Args:
        path: of the notebook, which is only read.
        folder: the working directory of its kernel.
        timeout: of a cell, in seconds.
    """
    book = read(path)
    resources = {"metadata": {"path": str(folder)}}
    nbclient.NotebookClient(
        book,
        timeout=timeout,
        kernel_name="python3",
        record_timing=False,
        coalesce_streams=True,
        resources=resources,
    ).execute()
    return book


def clean(book: Notebook) -> None:
    """Leave what a reader sees: metadata of the machine and of the editor goes."""
    book.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python", "pygments_lexer": "python"},
    }
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number:02d}"
        cell.metadata = {}
    for cell in code_cells(book):
        for output in cell.outputs:
            if "metadata" in output:
                output.metadata = {}


def main(names: list[str]) -> None:
    for path in [FOLDER / f"{name}.ipynb" for name in names] or BOOKS:
        start = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            book = execute(path, Path(folder))
        clean(book)
        nbformat.write(book, path)
        print(f"{path.name}: {time.perf_counter() - start:.0f} s, {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
