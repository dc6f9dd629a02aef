"""Writes and reads a folder of arrays by orbax, with errors that name their cause."""

import errno
import logging
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

# The error number of the system in an error of tensorstore, which has no other field for it.
_SYSTEM_ERROR = re.compile(r"\[os_error_code='(\d+)'\]")


def write_arrays(folder: Path, arrays: Mapping[str, Any]) -> None:
    """Write arrays of at least one element into a new folder.

    A failure is an `OSError`, raised when nothing is being written any more.
    """
    with _without_logs(), _checkpointer() as checkpointer:
        try:
            checkpointer.save(folder.absolute(), dict(arrays))
        except Exception as error:
            found = _SYSTEM_ERROR.search(str(error))
            number = int(found[1]) if found else errno.EIO
            raise OSError(number, os.strerror(number) if found else str(error)) from error


def read_arrays(folder: Path) -> dict[str, Any]:
    """Return the arrays that `write_arrays` wrote."""
    with _checkpointer() as checkpointer:
        return dict(checkpointer.restore(folder.absolute()))


@contextmanager
def _without_logs() -> Iterator[None]:
    """Keep orbax from logging its progress, and the tracebacks of errors that it raises."""

    # Imported here, as orbax is: it sets the class of the logger that orbax uses.
    from absl import logging as absl_logging

    def is_kept(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname

    logger = absl_logging.get_absl_logger()
    logger.addFilter(is_kept)
    try:
        yield
    finally:
        logger.removeFilter(is_kept)


def _checkpointer() -> Any:
    # Imported here, because the import takes seconds.
    import jax
    import orbax.checkpoint as ocp

    # orbax starts jax, which would take most of a GPU's memory although all arrays here are
    # numpy's. A platform that somebody has chosen stays; a jax that already runs is not affected.
    config: Any = jax.config
    if not config.jax_platforms:
        config.update("jax_platforms", "cpu")

    registry = ocp.type_handlers.create_type_handler_registry(
        (np.ndarray, _patient_handler()()), (jax.Array, ocp.type_handlers.ArrayHandler())
    )
    # A folder for each array. orbax's default, one database for all of them, holds on to memory
    # at each save, and takes longer to write (docs/benchmarks.md).
    handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry, use_ocdbt=False)
    return ocp.Checkpointer(handler)


@cache
def _patient_handler() -> Any:
    """Return orbax's handler of numpy arrays, made to fail only when nothing is being written."""
    import orbax.checkpoint as ocp

    class PatientHandler(ocp.type_handlers.NumpyHandler):
        """Writes arrays, and fails only when none is being written any more.

        orbax leaves at the first that cannot be written, and closes the event loop under the
        others: each of them then prints a traceback, perhaps long after the save.
        """

        def __init__(self) -> None:
            super().__init__()
            self._failures: list[Exception] = []

        async def _open_and_write(self, *args: Any, **named: Any) -> None:
            try:
                await super()._open_and_write(*args, **named)
            except Exception as error:
                self._failures.append(error)

        async def _background_serialize(self, *args: Any, **named: Any) -> None:
            await super()._background_serialize(*args, **named)
            if self._failures:
                raise self._failures[0]

    return PatientHandler
