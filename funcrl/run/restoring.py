"""Checkpoints on the disk: which there are, and what one holds, checked before it is used."""

import fcntl
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from funcrl.core import tree
from funcrl.core.arrays import to_tensor
from funcrl.core.reading import read_text
from funcrl.core.types import Tree
from funcrl.run.manifest import (
    MANIFEST,
    STATE,
    Manifest,
    array_checksum,
    check_like,
    decode,
    file_checksums,
    outline,
    trees_beside,
)
from funcrl.run.storage import read_arrays

OnSkip: TypeAlias = Callable[[str], None] | None
_MOST_BYTES = 1 << 30  # of a manifest, with whatever facts its maker put there


class CheckpointError(ValueError):
    """A checkpoint that is torn, changed, not of funcrl, or missing."""


class Restored(NamedTuple):
    """A checkpoint that has been read."""

    step: int
    state: Tree
    extra: dict[str, Any]
    beside: tuple[Tree, ...] = ()  # further trees, where they were asked for


def numbered(folder: Path) -> dict[int, Path]:
    """Return where each numbered checkpoint is, good or not, lowest first."""
    names = os.listdir(folder) if folder.is_dir() else []
    numbers = {name.removeprefix(".").removesuffix(".old") for name in names}
    found = sorted(int(name) for name in numbers if re.fullmatch(r"0|[1-9][0-9]*", name))
    paths = ((step, _unreplaced(folder / str(step))) for step in found)
    return {step: path for step, path in paths if path.exists()}


def read_newest(
    folder: Path, like: Tree, on_skip: OnSkip, of_field: str = "", beside: Tree = None
) -> Restored:
    """Return the newest good one of a folder's numbered checkpoints.

    Args:
        folder: of the checkpoints.
        like: as of `read`.
        on_skip: called with a reason for each broken one; it is an error if all are broken.
        of_field: as of `read`.
        beside: as of `read`.
    """
    while True:
        there, found = numbered(folder), None
        reasons: list[str] = []
        for step, path in reversed(there.items()):
            try:
                found = Restored(step, *read(path, like, of_field, beside))
                break
            except CheckpointError as error:
                reasons.append(str(error))
        # Another process may have written one meanwhile, and deleted those that were there.
        if found is not None or numbered(folder).keys() <= there.keys():
            break
    if on_skip is not None:
        for reason in reasons:
            on_skip(reason)
    if found is None:
        listed = " ".join(reasons)
        raise CheckpointError(f"restore expects a good checkpoint in {folder}: {listed}")
    return found


def read(
    path: Path, like: Tree, of_field: str = "", beside: Tree = None
) -> tuple[Tree, dict[str, Any], tuple[Tree, ...]]:
    """Return the state of a checkpoint, its facts and the trees beside it.

    Args:
        path: of the checkpoint.
        like: a tree like the state, or one like its field.
        of_field: the field's name; "" for the whole state.
        beside: a tree like each of those beside the state; without it they are not read.
    """
    path = _unreplaced(path)
    with _kept(path):
        return _read(path, like, of_field, beside)


@contextmanager
def _kept(path: Path) -> Iterator[None]:
    """Keep a process that thins checkpoints out from deleting one that is read."""
    with ExitStack() as at_end:
        with suppress(OSError):  # it is not there, or its disk has no locks
            at_end.callback(os.close, _lock(path, fcntl.LOCK_SH))
        yield


@contextmanager
def unread(path: Path) -> Iterator[bool]:
    """Give whether no process reads a checkpoint; none begins to until the end."""
    with ExitStack() as at_end:
        try:
            at_end.callback(os.close, _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB))
            is_unread = True
        except OSError as error:
            is_unread = not isinstance(error, BlockingIOError)  # others: a disk without locks
        yield is_unread


def _lock(folder: Path, kind: int) -> int:
    """Return an open handle of a folder, which is locked until it is closed."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, kind)
    except OSError:
        os.close(handle)
        raise
    return handle


def _read(
    path: Path, like: Tree, of_field: str, beside: Tree
) -> tuple[Tree, dict[str, Any], tuple[Tree, ...]]:
    manifest = read_manifest(path)
    saved = enumerate(manifest["leaves"])
    of_state = [
        each for each in saved if not of_field or each[1]["path"].partition(".")[0] == of_field
    ]
    wanted = [(of_state, like)]
    if beside is not None:
        start = len(manifest["leaves"])
        for leaves in trees_beside(manifest):
            wanted.append(([*enumerate(leaves, start)], beside))
            start += len(leaves)
    for described, tree_like in wanted:
        check_like(path, [leaf for _, leaf in described], outline("restore", tree_like))
    arrays = _read_arrays(path, manifest["files"]) if manifest["files"] else {}
    state, *others = (_filled(path, manifest, arrays, *each) for each in wanted)
    return state, manifest["extra"], tuple(others)


def _filled(
    path: Path,
    manifest: Manifest,
    arrays: Mapping[str, Any],
    described: Sequence[tuple[int, Mapping[str, Any]]],
    like: Tree,
) -> Tree:
    """Return a tree like `like` with the arrays of these numbers, after checking their sums."""
    wanted, unflatten = tree.flatten(like)
    leaves = []
    for (index, leaf_of), leaf in zip(described, wanted, strict=True):
        array = arrays.get(str(index), np.zeros(0))
        if array_checksum(array) != manifest["checksums"][index]:
            raise _broken(path, f"whose {leaf_of['path']!r} is not what was saved")
        leaves.append(to_tensor(array, leaf) if leaf.numel() else torch.empty_like(leaf))
    return unflatten(leaves)


def _read_arrays(path: Path, files: dict[str, int]) -> dict[str, Any]:
    # The files are checked first: a changed length would make orbax reserve any amount of memory.
    try:
        changed = sorted(files.items() - file_checksums(path, STATE).items())
        if not changed:
            return read_arrays(path / STATE)
    except Exception as error:
        raise _broken(path, f"whose {STATE} cannot be read, {error!r}") from error
    raise _broken(path, f"whose {changed[0][0]} is torn, changed or missing")


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, which is broken without one."""
    if not path.exists():
        raise CheckpointError(f"restore expects a checkpoint, got none at {path}.")
    try:
        text = read_text("restore", path / MANIFEST, _MOST_BYTES)
    except (OSError, ValueError) as error:
        raise _broken(path, f"whose {MANIFEST} is missing or no text") from error
    try:
        return decode(text)
    except ValueError as error:
        raise _broken(path, f"whose {MANIFEST} {error}") from error


def _unreplaced(path: Path) -> Path:
    """Return where the checkpoint is, if a process was killed while it replaced it."""
    old = path.with_name(f".{path.name}.old")
    return old if not path.exists() and old.exists() else path


def _broken(path: Path, what: str) -> CheckpointError:
    return CheckpointError(f"restore expects a whole checkpoint, got {path}, {what}.")
