"""Text that came from a model, a task or a file, made safe to print on a terminal."""

import logging
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

# What drives a terminal, or shows text in another order than it has: control characters but newline
# and tab, bidirectional overrides and isolates. And halves of surrogates, which no terminal takes.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return text with each character that could drive a terminal as its Python escape.

    Everything that came from a model, a task or a file may hold such characters.

    Example:
        >>> from funcrl.core.terminal import printable
        >>> print(printable("a reward's \\x1b[2J"))
        a reward's \\x1b[2J
    """
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def escaped(text: str, keep: str = "") -> str:
    """Return text with each character that cannot be seen as its Python escape.

    Args:
        text: of anybody.
        keep: characters to leave, such as the end of a line.

    Example:
        >>> from funcrl.core.terminal import escaped
        >>> text = chr(7) + chr(10)
        >>> print(escaped(text))
        \\x07\\n
    """
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def print_safely(text: str, file: TextIO | None = None) -> None:
    """Print a text so that it drives no terminal.

    Args:
        text: of anybody.
        file: standard output when left out.

    Example:
        >>> from funcrl.core.terminal import print_safely
        >>> print_safely("\\x1b[2J")
        \\x1b[2J
    """
    print(printable(text), file=file, flush=True)


def warn_safely(text: str, stacklevel: int = 3) -> None:
    """Warn with a text that drives no terminal.

    Args:
        text: of anybody.
        stacklevel: whose line the warning names: 2 is the caller of this, 3 the caller of that.

    Example:
        >>> import warnings
        >>> from funcrl.core.terminal import warn_safely
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     warn_safely("\\x1b[2J")
        >>> print(caught[0].message)
        \\x1b[2J
    """
    warnings.warn(printable(text), stacklevel=stacklevel)


@contextmanager
def safe_warnings(file: TextIO) -> Iterator[None]:
    """Print the warnings of Python, which may quote anybody's text, so that they drive no terminal.

    Args:
        file: where they go.

    Example:
        >>> import sys, warnings
        >>> from funcrl.core.terminal import safe_warnings
        >>> with safe_warnings(sys.stdout), warnings.catch_warnings():
        ...     warnings.simplefilter("always")
        ...     warnings.warn_explicit("\\x1b[2J", UserWarning, "task.py", 3)
        task.py:3: UserWarning: \\x1b[2J
        <BLANKLINE>
    """
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
