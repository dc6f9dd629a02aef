"""Files that are written whole: a crash leaves the old content or the new one, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# A lone surrogate, which a tokenizer may give and UTF-8 does not have, becomes JSON's own escape.
ENCODING: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that a crash leaves the old text or the new one, never a part."""
    with whole_file(path) as file:
        file.write(bytes(text, **ENCODING))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write to, which replaces `path` at the end, unless an error is raised."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.unlink(missing_ok=True)
        with draft.open("xb") as file:  # never through a link that somebody left there
            yield file
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Return once the content of a file, or the list of names in a folder, is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
