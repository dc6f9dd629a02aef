"""The files of a checkpoint: written, listed with their checksums, and stored by orbax."""

import errno
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from funcrl.core import checks, tree
from funcrl.core.arrays import to_array
from funcrl.core.files import brief, sync
from funcrl.core.types import Tree

Manifest: TypeAlias = dict[str, Any]
STATE, MANIFEST = "state", "manifest.json"  # what a checkpoint's folder has
_FORMAT = "funcrl checkpoint 3"
_FORMATS = (_FORMAT, "funcrl checkpoint 2")  # the second has each array in a folder of its own
_SMALL = 1 << 20  # bytes of an array: orbax takes a millisecond and two files for each
_TOGETHER = "together"  # the array that has the bytes of all small ones, and the manifest's sizes
_FIELDS = {"leaves": list, "checksums": list, "files": dict, "extra": dict}
_LEAF_FIELDS = {"path": str, "shape": list, "dtype": str}


def describe(
    state: Tree, extra: Mapping[str, Any] | None, score: float | None, beside: Sequence[Tree] = ()
) -> Manifest:
    """Return the manifest of a state that is not yet written, so without checksums."""
    scored = score is not None and math.isfinite(score)
    return {
        "format": _FORMAT, "leaves": outline("save", state), "score": score if scored else None,
        **({"beside": [outline("save", each) for each in beside]} if beside else {}),
        # Encoded now, so that facts that JSON cannot hold raise here and not in the background.
        "extra": json.loads(json.dumps(dict(extra or {}))),
    }  # fmt: skip


def outline(function: str, state: Tree) -> list[dict[str, Any]]:
    """Return path, shape and dtype of each leaf; raise for one whose bytes are not all of it."""
    leaves = []
    for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True):
        checks.check_tensor(function, path, leaf)
        if leaf.layout != torch.strided or leaf.is_quantized or leaf.is_meta:
            raise TypeError(
                f"{function} expects {path} to be a dense tensor with values, neither sparse nor "
                f"quantized nor on the meta device, got {leaf.dtype}, {leaf.layout}, {leaf.device}."
            )
        leaves.append({"path": path, "shape": list(leaf.shape), "dtype": str(leaf.dtype)})
    return leaves


def check_like(path: Path, saved: list[dict[str, Any]], wanted: list[dict[str, Any]]) -> None:
    """Raise unless the checkpoint at `path` has the wanted leaves, and no others."""
    ours, theirs = ({leaf["path"]: leaf for leaf in leaves} for leaves in (wanted, saved))
    for at in [*ours, *theirs]:
        want, got = ours.get(at), theirs.get(at)
        if want != got:
            raise ValueError(
                f"restore expects {_leaf_words(want)} for {at!r}, got {_leaf_words(got)} in {path}."
            )
    if saved != wanted:  # two leaves of one path, or another order
        raise ValueError(f"restore expects the leaves {[*ours]}, got {[*theirs]} in {path}.")


def trees_beside(manifest: Manifest) -> list[list[dict[str, Any]]]:
    """Return the leaves of each tree that a checkpoint holds beside its state; often none."""
    found: list[list[dict[str, Any]]] = manifest.get("beside", [])
    return found


def encode(manifest: Manifest) -> str:
    """Return the text of a manifest, with a checksum of itself."""
    checksum = zlib.crc32(json.dumps(manifest).encode())
    return json.dumps({"checksum": checksum, "checkpoint": manifest}) + "\n"


def decode(text: str) -> Manifest:
    """Return the manifest in a text; a ValueError says in what the text differs from one.

    Each field is checked, because anybody can write other ones with a right checksum.
    """
    try:
        manifest = json.loads(text)["checkpoint"]
        version = manifest["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError("is torn or not of funcrl") from error
    if text != encode(manifest):
        raise ValueError("has changed since it was saved")
    if version not in _FORMATS:
        raise ValueError(f"has the format {brief(version)} and not {_FORMAT!r}")
    if not _has_all_fields(manifest):
        raise ValueError("has other fields than funcrl writes")
    return dict(manifest)


def array_checksum(array: Any) -> int:
    """Return the checksum of an array's numbers."""
    return zlib.crc32(_bytes_of(array).data)


def _bytes_of(array: Any) -> Any:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def file_checksums(checkpoint: Path, folder: str) -> dict[str, int]:
    """Return the checksum of each file in a folder of a checkpoint, by its path in there."""
    files = [each for each in (checkpoint / folder).rglob("*") if each.is_file()]
    return {str(each.relative_to(checkpoint)): _file_checksum(each) for each in files}


def _file_checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as file:  # which may be larger than memory
        while part := file.read(1 << 24):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _has_all_fields(found: Mapping[str, Any]) -> bool:
    if not _has(found, _FIELDS) or not isinstance(found.get("score", ()), int | float | None):
        return False
    beside = found.get("beside", [])
    if not isinstance(beside, list) or not all(isinstance(each, list) for each in beside):
        return False
    sums, files = found["checksums"], found["files"]
    leaves = [*found["leaves"], *(leaf for each in beside for leaf in each)]
    sizes = found.get(_TOGETHER, {})
    return (
        len(sums) == len(leaves)
        and isinstance(sizes, dict)
        and all(isinstance(each, int) for each in [*sums, *files.values(), *sizes.values()])
        and all(isinstance(leaf, dict) and _has(leaf, _LEAF_FIELDS) for leaf in leaves)
    )


def _has(values: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(values.get(name), kind) for name, kind in kinds.items())


def _leaf_words(leaf: dict[str, Any] | None) -> str:
    return "nothing" if leaf is None else f"{leaf['dtype'][:50]} of shape {brief(leaf['shape'])}"


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


def to_arrays(state: Tree) -> dict[str, Any]:
    """Return the leaves as arrays by number; on a CPU they share the tensors' memory."""
    return {str(index): to_array(leaf) for index, leaf in enumerate(tree.leaves(state))}


def _joined(arrays: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, int]]:
    """Return what is written of arrays, small ones as the bytes of one, and the sizes of those."""
    small = {name: _bytes_of(array) for name, array in arrays.items() if array.nbytes < _SMALL}
    written = {name: array for name, array in arrays.items() if name not in small}
    if any(array.size for array in small.values()):
        written[_TOGETHER] = np.concatenate([*small.values()])
    return written, {name: array.size for name, array in small.items()}


def apart(written: Mapping[str, Any], manifest: Manifest) -> dict[str, Any]:
    """Return the arrays by number of those that were written, small ones as their bytes."""
    arrays, sizes = dict(written), manifest.get(_TOGETHER, {})
    ends = np.cumsum([*sizes.values()], dtype=np.int64)
    small = np.split(arrays.pop(_TOGETHER, np.zeros(0, np.uint8)), ends)
    # Copies, which do not keep each other alive.
    return arrays | {name: part.copy() for name, part in zip(sizes, small, strict=False)}


def write(path: Path, manifest: Manifest, arrays: dict[str, Any]) -> None:
    """Write a checkpoint; an old one of that name stays until all of it is on disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        # Replacing a folder deletes it, so it must be one that a save has written.
        if path.exists() and not {each.name for each in path.iterdir()} <= {STATE, MANIFEST}:
            raise FileExistsError("a folder with other things in it is there")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir()
        # Before orbax writes, so that the checksum reveals a tensor that changes meanwhile.
        sums = [array_checksum(array) for array in arrays.values()]
        written, sizes = _joined(arrays)
        if written:  # else the manifest alone brings back the arrays, which have no elements
            write_arrays(draft / STATE, written)
        files = file_checksums(draft, STATE)
        text = encode(manifest | {"checksums": sums, "files": files, _TOGETHER: sizes})
        (draft / MANIFEST).write_text(text, encoding="utf-8")
        # orbax syncs the data that it writes, but neither its metadata nor its folders.
        for each in [*draft.rglob("*"), draft]:
            sync(each)
        _replace(path, draft)
    except Exception as error:
        raise OSError(
            f"save could not write {path}: {_reason(error)}; older ones are whole."
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def clean_up(folder: Path, name: str = r"\d+") -> None:
    """Remove the drafts of killed processes, and rename back what they were replacing."""
    # A killed process may leave .NAME.7.draft, .NAME.old and .NAME.gone.
    left_over = re.compile(rf"\.({name})\.(\d+\.draft|old|gone)")
    for path in folder.iterdir():
        if left_over.fullmatch(path.name):
            named = folder / path.name.split(".")[1]
            if path.suffix == ".old" and not named.exists():
                path.rename(named)
            else:
                shutil.rmtree(path, ignore_errors=True)


def _replace(path: Path, draft: Path) -> None:
    """Rename the draft; an old checkpoint of that name can be restored until then."""
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    draft.rename(path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).splitlines()[0] if str(error) else type(error).__name__
