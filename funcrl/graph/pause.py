"""A pause of Python's search for reference cycles, while a graph is written."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Run a block, or a function that this decorates, without a search for reference cycles.

    A step's graph is a million objects, all of them alive: Python would look through them again
    and again, for a quarter of the time that a trace takes, and free nothing. Python has one such
    search for the whole process: other threads go without it meanwhile.

    Example:
        >>> import gc
        >>> from funcrl.graph.pause import without_collection
        >>> with without_collection():
        ...     paused = gc.isenabled()
        >>> paused, gc.isenabled()
        (False, True)
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
