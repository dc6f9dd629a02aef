"""Checkpoints: a tree of tensors and a few facts, written whole or not at all, and bit-exact.

    PATH/state/           the leaves, written by orbax, those under 1 MB as one array
    PATH/manifest.json    their paths, shapes, dtypes and checksums, and the facts

A checkpoint is made under a hidden name and renamed when all of it is on disk: the rename is the
commit. The manifest and its checksums reveal folders that are torn, changed or not of funcrl.

The numbered ones are kept by hand because orbax's `CheckpointManager` (0.12.8) leaves out a step
below the newest, raises for one that is there, and restores no older one if the newest is broken;
and orbax's own rename commits its arrays alone, with neither their metadata nor folders synced.
"""

import contextlib
import fcntl
import math
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from funcrl.core import checks, tree
from funcrl.core.arguments import TensorTree, checked
from funcrl.core.arrays import to_tensor
from funcrl.core.files import read_text
from funcrl.core.printing import warn_safely
from funcrl.core.types import Tree
from funcrl.run.storage import (
    MANIFEST,
    STATE,
    Manifest,
    apart,
    array_checksum,
    check_like,
    clean_up,
    decode,
    describe,
    file_checksums,
    outline,
    read_arrays,
    to_arrays,
    trees_beside,
    write,
)

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
    """Return the newest good one of a folder's numbered checkpoints."""
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
    """Keep a checkpoint from being deleted by another process while this block reads it."""
    with ExitStack() as at_end:
        with suppress(OSError):  # it is not there, or its disk has no locks
            at_end.callback(os.close, _lock(path, fcntl.LOCK_SH))
        yield


@contextmanager
def unread(path: Path) -> Iterator[bool]:
    """Yield whether no process reads a checkpoint, and let none begin to within the block."""
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
    arrays = _read_arrays(path, manifest) if manifest["files"] else {}
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


def _read_arrays(path: Path, manifest: Manifest) -> dict[str, Any]:
    # The files are checked first: a changed length would make orbax reserve any amount of memory.
    try:
        changed = sorted(manifest["files"].items() - file_checksums(path, STATE).items())
        if not changed:
            return apart(read_arrays(path / STATE), manifest)
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


Extra: TypeAlias = Mapping[str, Any] | None


@checked
def save(path: Path | str, state: TensorTree, extra: Extra = None) -> None:
    """Write a checkpoint; when this returns it is on disk, and when it fails nothing is harmed.

    Args:
        path: the folder to make; an old checkpoint there is replaced.
        state: a tree of dense tensors of any dtype that is not quantized, such as a `TrainState`.
        extra: what JSON can hold.

    Example:
        >>> import pathlib, tempfile, torch, funcrl
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "five"
        >>> funcrl.save(path, {"w": torch.ones(2)}, {"step": 5})
        >>> funcrl.restore(path, like={"w": torch.zeros(2)})
        ({'w': tensor([1., 1.])}, {'step': 5})
    """
    write(Path(path), describe(state, extra, None), to_arrays(state))


@checked
def restore(path: Path | str, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """Return the state and the extra facts of a checkpoint, equal to the bit to what was saved.

    The learning rate of an optimizer that was given a number is part of its state, and comes back:
    `funcrl.optim.with_learning_rate` puts another one there. A schedule is not.

    Args:
        path: a checkpoint, or a folder of numbered ones such as RUN/checkpoints, of which the
            newest good one is read; a warning names each newer one that is broken.
        like: a tree of the same structure, shapes and dtypes, on the devices to restore to.

    Example:
        >>> import funcrl
        >>> funcrl.restore("no/such/folder", like={})
        Traceback (most recent call last):
        funcrl.run.checkpoint.CheckpointError: restore expects a checkpoint, got none at \
no/such/folder.
    """
    return _restored(Path(path), like, of_field="")


@checked
def restore_field(path: Path | str, field: str, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """Return one field of a saved state and the extra facts, as `restore` does.

    What the other fields hold does not matter, such as the state of an optimizer.

    Args:
        path: as of `restore`.
        field: such as "params" of a `TrainState`.
        like: as of `restore`, for the field alone.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from funcrl.run.checkpoint import restore_field, save
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "five"
        >>> save(path, {"params": torch.ones(2), "moments": torch.zeros(9)})
        >>> restore_field(path, "params", like=torch.zeros(2))
        (tensor([1., 1.]), {})
    """
    state, extra = _restored(Path(path), {field: like}, of_field=field)
    return state[field], extra


def _restored(path: Path, like: Tree, of_field: str) -> tuple[Tree, dict[str, Any]]:
    if not (path / MANIFEST).exists() and numbered(path):
        warn = partial(warn_safely, stacklevel=7)
        found = read_newest(path, like, on_skip=warn, of_field=of_field)
        return found.state, found.extra
    state, extra, _ = read(path, like, of_field)
    return state, extra


def restore_newest(folder: Path, like: Tree, beside: Tree, step: int | None = None) -> Restored:
    """Return the newest good one of a folder's numbered checkpoints, with the trees beside it.

    Args:
        folder: such as RUN/checkpoints.
        like: as of `restore`.
        beside: a tree of the structure of each that was saved beside the state.
        step: the number of the one to return, in place of the newest.
    """
    if step is not None:
        return Restored(step, *read(folder / str(step), like, beside=beside))
    if not numbered(folder):
        raise CheckpointError(f"restore expects a checkpoint, got none at {folder}.")
    return read_newest(folder, like, on_skip=warn_safely, beside=beside)


class Checkpoints:
    """A folder of numbered checkpoints, written in the background: the last ones and the best.

    A state is never mutated, so that it can be written while training goes on; `wait` before the
    buffers of a state on a CPU are donated. A save waits for the one before it, and raises its
    error if it failed. One process at a time writes to a folder, and closes it before it ends.
    """

    def __init__(self, folder: Path | str, keep_last: int = 3, keep_best: int = 1) -> None:
        checks.check_count("Checkpoints", "keep_last", keep_last)
        checks.check_range("Checkpoints", "keep_best", keep_best, 0, math.inf)
        self.folder = Path(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            probe = self.folder / f".probe.{os.getpid()}"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            reason = f"got {folder}: {error.strerror}."
            raise OSError(f"Checkpoints expects a folder that it can write to, {reason}") from error
        self._keep_last, self._keep_best = keep_last, keep_best
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[int] | None = None
        self.newest: int | None = None  # the last one that was restored or saved

    def save(
        self, step: int, state: Tree, extra: Extra = None, score: float | None = None,
        beside: Sequence[Tree] = (),
    ) -> None:  # fmt: skip
        """Begin to write checkpoint number `step`; a score that is not finite counts as none.

        Args:
            step: its number.
            state: the tree that `restore` returns.
            extra: what JSON can hold.
            score: by which the best are kept.
            beside: further trees, which `restore_latest` returns if it is given one like them.
        """
        if not isinstance(step, int) or step < 0:
            raise ValueError(f"Checkpoints.save expects step to be an integer >= 0, got {step!r}.")
        self.wait()
        manifest = describe(state, extra, score, beside)
        arrays = to_arrays((state, *beside))
        self._pending = self._writer.submit(self._write, step, manifest, arrays)

    def wait(self) -> None:
        """Return when nothing is being written; raise if the last save failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self.newest = pending.result()

    def close(self) -> None:
        """Wait, and end the background thread."""
        with self._writer:
            self.wait()

    def steps(self) -> list[int]:
        """Return the numbers of the checkpoints on disk, lowest first."""
        found = numbered(self.folder).items()
        return [step for step, path in found if (path / MANIFEST).is_file()]

    def restore_latest(
        self, like: Tree, on_skip: OnSkip = None, beside: Tree = None
    ) -> Restored | None:
        """Return the newest good checkpoint, None when there is none at all.

        Args:
            like: as of `restore`.
            on_skip: called with a reason for each broken one; it is an error if all are broken.
            beside: a tree like those that were saved beside the state; without it they are left.
        """
        if not numbered(self.folder):
            return None
        found = read_newest(self.folder, like, on_skip, beside=beside)
        self.newest = found.step
        return found

    def _write(self, step: int, manifest: Manifest, arrays: dict[str, Any]) -> int:
        clean_up(self.folder)
        write(self.folder / str(step), manifest, arrays)
        self._thin_out(step)
        return step

    def _thin_out(self, newest: int) -> None:
        """Delete the checkpoints up to the newest that are neither among the last nor the best.

        Higher numbers are of an earlier attempt that could not be resumed; they will be replaced.
        """
        scores: dict[int, float | None] = {}
        for step, path in numbered(self.folder).items():
            # A checkpoint whose manifest is broken is left for a person to look at.
            with contextlib.suppress(CheckpointError):
                scores[step] = read_manifest(path)["score"]
        mine = [step for step in scores if step <= newest]
        scored = sorted((s for s in mine if scores[s] is not None), key=lambda s: (scores[s], s))
        kept = {*mine[-self._keep_last :], *scored[max(0, len(scored) - self._keep_best) :]}
        for step in set(mine) - kept:
            with unread(self.folder / str(step)) as is_unread:
                if not is_unread:
                    continue  # it goes with a later save
                # Renamed first, so that a part of it never has its number as a name.
                gone = self.folder / f".{step}.gone"
                (self.folder / str(step)).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
