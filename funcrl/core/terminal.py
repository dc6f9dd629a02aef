"""Text that came from a model, a task or a file, made safe to print on a terminal."""

import logging
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO, TypeAlias

Note: TypeAlias = Callable[[str], None]  # is told a line of text

# Control characters but newline and tab, which drive a terminal; bidirectional overrides and
# isolates, which show text in another order; and lone surrogates, which cannot be encoded.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return text in which each character that could drive a terminal is a Python escape.

    Everything that came from a model, a task or a file may hold such characters.
    """
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def escaped(text: str, keep: str = "") -> str:
    """Return text in which each invisible character is a Python escape, but for those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def print_safely(text: str, file: TextIO | None = None) -> None:
    """Print a text as `printable`, to standard output when no file is given."""
    print(printable(text), file=file, flush=True)


def warn_safely(text: str, stacklevel: int = 3) -> None:
    """Warn with a text as `printable`; a `stacklevel` of 2 names the line of the caller."""
    warnings.warn(printable(text), stacklevel=stacklevel)


@contextmanager
def safe_warnings(file: TextIO) -> Iterator[None]:
    """Print Python's warnings to `file` as `printable`: they may quote text of any origin."""
    logger, handler = logging.getLogger("py.warnings"), logging.StreamHandler(file)
    handler.setFormatter(_SafeFormatter())
    passes_on = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logger.propagate = passes_on
        logger.removeHandler(handler)


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
