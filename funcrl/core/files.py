"""Files that a crash leaves as they were or as they should be, never a part."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

# A lone surrogate, which a tokenizer may give and UTF-8 does not have, becomes JSON's own escape.
ENCODING: Any = {"encoding": "utf-8", "errors": "backslashreplace"}


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a crash leaves the old text or the new one, never a part.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl.core import files
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "config.yaml"
        >>> files.write_whole(path, "steps: 3")
        >>> path.read_text()
        'steps: 3'
    """
    with whole_file(path) as file:
        file.write(bytes(text, **ENCODING))


@contextmanager
def whole_file(path: Path) -> Iterator[BinaryIO]:
    """Give a file to write to that becomes `path` at the end, or nothing if an error ends it.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl.core import files
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "numbers"
        >>> with files.whole_file(path) as file:
        ...     _ = file.write(b"123")
        >>> path.read_bytes()
        b'123'
    """
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
    """Return when what was written to a file, or which names a folder has, is on disk.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl.core import files
        >>> files.sync(pathlib.Path(tempfile.mkdtemp()))
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
