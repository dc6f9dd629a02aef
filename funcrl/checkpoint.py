"""Checkpoints: a tree of tensors and a few facts on disk, whole or not at all, equal to the bit.

    PATH/state/           the leaves, written by orbax
    PATH/manifest.json    their paths, shapes, dtypes and checksums, and the facts

A checkpoint is made under a hidden name and renamed when all of it is on disk: the rename is the
commit. Torn, changed and foreign folders are told by the manifest and its checksums.
"""

import json
import math
import os
import shutil
import sys
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funcrl import checks, tree
from funcrl.types import Tree

_FORMAT = "funcrl checkpoint 1"
_STATE, _MANIFEST = "state", "manifest.json"


class CheckpointError(RuntimeError):
    """A checkpoint that could not be written, or that cannot be trusted."""


class Restored(NamedTuple):
    """A checkpoint read back."""

    step: int
    state: Tree
    extra: dict[str, Any]


def save(path: Path | str, state: Tree, extra: Mapping[str, Any] | None = None) -> None:
    """Write a checkpoint; when this returns it is on disk, and when it fails nothing is harmed.

    Args:
        path: the folder to make; an old checkpoint there is replaced.
        state: a tree of tensors, such as a `TrainState`.
        extra: what JSON can hold.

    Example:
        >>> import pathlib, tempfile, torch, funcrl
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "five"
        >>> funcrl.save(path, {"w": torch.ones(2)}, {"step": 5})
        >>> funcrl.restore(path, like={"w": torch.zeros(2)})
        ({'w': tensor([1., 1.])}, {'step': 5})
    """
    _write(Path(path), _to_arrays(state), _describe(state, extra or {}, None))


def restore(path: Path | str, like: Tree) -> tuple[Tree, dict[str, Any]]:
    """Return the state and the extra facts of a checkpoint, equal to the bit to what was saved.

    Args:
        path: a checkpoint, or a folder of numbered ones such as RUN/checkpoints, of which the
            newest good one is read.
        like: a tree of the same structure, shapes and dtypes, on the devices to restore to.

    Example:
        >>> import funcrl
        >>> funcrl.restore("no/such/folder", like={})
        Traceback (most recent call last):
        funcrl.checkpoint.CheckpointError: restore expects a checkpoint, got none at no/such/folder.
    """
    path = _unreplaced(Path(path))
    if not (path / _MANIFEST).exists() and _steps(path):
        found = _newest(path, like, on_skip=None)
        return found.state, found.extra
    return _read(path, like)


class Checkpoints:
    """A folder of numbered checkpoints, written in the background: the last ones and the best.

    A state is never mutated, so that it can be written while training goes on. A save waits for
    the one before it, and raises its error if it failed.

    Args:
        folder: made when it is missing.
        keep_last: how many of the newest stay.
        keep_best: how many of those with the highest score stay besides.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from funcrl.checkpoint import Checkpoints
        >>> checkpoints = Checkpoints(pathlib.Path(tempfile.mkdtemp()), keep_last=1)
        >>> for step in (1, 2, 3):
        ...     checkpoints.save(step, {"w": torch.full((1,), float(step))}, score=1 / step)
        >>> checkpoints.close()
        >>> checkpoints.steps(), checkpoints.newest(like={"w": torch.zeros(1)}).state
        ([1, 3], {'w': tensor([3.])})
    """

    def __init__(self, folder: Path, keep_last: int = 3, keep_best: int = 1) -> None:
        checks.check_count("Checkpoints", "keep_last", keep_last)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            probe = folder / f".probe.{os.getpid()}"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            raise CheckpointError(
                f"Checkpoints expects a folder that it can write to, got {folder}: "
                f"{error.strerror}."
            ) from error
        self.folder = folder
        self._keep_last, self._keep_best = keep_last, keep_best
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: Future[None] | None = None

    def save(
        self,
        step: int,
        state: Tree,
        extra: Mapping[str, Any] | None = None,
        score: float | None = None,
    ) -> None:
        """Begin to write checkpoint number `step`; a score that is not finite counts as none."""
        self.wait()
        arrays, manifest = _to_arrays(state), _describe(state, extra or {}, score)
        self._pending = self._writer.submit(self._write, step, arrays, manifest)

    def wait(self) -> None:
        """Return when nothing is being written; raise if the last save failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait, and end the background thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()

    def steps(self) -> list[int]:
        """Return the numbers of the checkpoints on disk, lowest first."""
        return _steps(self.folder)

    def newest(self, like: Tree, on_skip: Callable[[str], None] | None = None) -> Restored | None:
        """Return the newest good checkpoint, None when there is none at all.

        Broken ones are skipped, and `on_skip` told why; if all are broken that is an error.
        """
        return _newest(self.folder, like, on_skip) if self.steps() else None

    def _write(self, step: int, arrays: dict[str, Any], manifest: dict[str, Any]) -> None:
        _write(self.folder / str(step), arrays, manifest)
        self._thin_out()

    def _thin_out(self) -> None:
        """Delete what neither is new nor good, and what a killed process left behind."""
        steps = self.steps()
        scores = {step: _score(self.folder / str(step)) for step in steps}
        scored = sorted((s for s in steps if scores[s] > -math.inf), key=lambda s: (scores[s], s))
        kept = {*steps[-self._keep_last :], *scored[len(scored) - self._keep_best :]}
        for step in steps:
            if step not in kept:
                _delete(self.folder / str(step))
        for left in self.folder.glob(".*"):
            if not left.name.endswith(".old"):
                shutil.rmtree(left, ignore_errors=True)


def _steps(folder: Path) -> list[int]:
    if not folder.is_dir():
        return []
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def _newest(folder: Path, like: Tree, on_skip: Callable[[str], None] | None) -> Restored:
    reasons = []
    for step in reversed(_steps(folder)):
        try:
            return Restored(step, *_read(folder / str(step), like))
        except CheckpointError as error:
            reasons.append(str(error))
            if on_skip is not None:
                on_skip(str(error))
    raise CheckpointError(f"restore expects a good checkpoint in {folder}: " + " ".join(reasons))


def _to_arrays(state: Tree) -> dict[str, Any]:
    """Return the leaves as arrays by number; on a CPU they share the tensors' memory."""
    arrays = {}
    for index, (path, leaf) in enumerate(zip(tree.paths(state), tree.leaves(state), strict=True)):
        checks.check_tensor("save", path, leaf)
        flat = leaf.detach().cpu().contiguous()
        if flat.dtype == torch.bfloat16:
            import ml_dtypes

            arrays[str(index)] = flat.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        else:
            arrays[str(index)] = flat.numpy()
    return arrays


def _describe(state: Tree, extra: Mapping[str, Any], score: float | None) -> dict[str, Any]:
    leaves = [
        {"path": path, "shape": list(leaf.shape), "dtype": str(leaf.dtype)}
        for path, leaf in zip(tree.paths(state), tree.leaves(state), strict=True)
    ]
    known = score is not None and math.isfinite(score)
    # Encoded now, so that what JSON cannot hold is refused here and not in the background.
    facts = json.loads(json.dumps(dict(extra)))
    return {
        "format": _FORMAT, "leaves": leaves, "extra": facts, "score": score if known else None,
    }  # fmt: skip


def _write(path: Path, arrays: dict[str, Any], manifest: dict[str, Any]) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        sums = [_checksum(array) for array in arrays.values()]
        # orbax cannot hold an array without elements; the manifest alone brings it back.
        filled = {name: array for name, array in arrays.items() if array.size}
        if filled:
            _orbax().save((draft / _STATE).absolute(), filled)
        _write_synced(draft / _MANIFEST, json.dumps(manifest | {"checksums": sums}))
        _sync(draft)
        _replace(path, draft)
    except Exception as error:
        shutil.rmtree(draft, ignore_errors=True)
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"save could not write {path}: {reason}. Nothing that was saved before is harmed."
        ) from error


def _replace(path: Path, draft: Path) -> None:
    """Give the draft its name; an old checkpoint of that name stays readable until then."""
    old = path.with_name(f".{path.name}.old")
    if path.exists():
        shutil.rmtree(old, ignore_errors=True)
        path.rename(old)
    draft.rename(path)
    _sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _unreplaced(path: Path) -> Path:
    """Return where the checkpoint is, if a process was killed while it replaced it."""
    old = path.with_name(f".{path.name}.old")
    return old if not path.exists() and old.exists() else path


def _delete(path: Path) -> None:
    """Delete a checkpoint so that at no moment a part of it bears its name."""
    hidden = path.with_name(f".{path.name}.deleted")
    path.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def _read(path: Path, like: Tree) -> tuple[Tree, dict[str, Any]]:
    manifest = _read_manifest(path)
    _check_like(path, manifest["leaves"], like)
    wanted, unflatten = tree.flatten(like)
    sizes = [math.prod(leaf["shape"]) for leaf in manifest["leaves"]]
    try:
        arrays = _orbax().restore((path / _STATE).absolute()) if any(sizes) else {}
    except Exception as error:
        raise CheckpointError(
            f"restore expects a whole checkpoint, got {path}, whose state cannot be read: "
            f"{type(error).__name__}."
        ) from error
    leaves = []
    for index, (leaf, size) in enumerate(zip(wanted, sizes, strict=True)):
        array = arrays.get(str(index)) if size else np.zeros(0)
        if size and (array is None or _checksum(array) != manifest["checksums"][index]):
            raise CheckpointError(
                f"restore expects a whole checkpoint, got {path}, in which "
                f"{manifest['leaves'][index]['path']!r} has changed since it was saved."
            )
        leaves.append(_to_tensor(array, leaf) if size else torch.empty_like(leaf))
    return unflatten(leaves), manifest["extra"]


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / _MANIFEST
    if not path.exists():
        raise CheckpointError(f"restore expects a checkpoint, got none at {path}.")
    try:
        manifest = json.loads(file.read_bytes())
        if manifest["format"] == _FORMAT and len(manifest["checksums"]) == len(manifest["leaves"]):
            return dict(manifest)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"restore expects a checkpoint of funcrl, got {path}, whose {_MANIFEST} is missing or "
            f"broken."
        ) from error
    raise CheckpointError(f"restore expects {_FORMAT!r}, got another format in {file}.")


def _check_like(path: Path, leaves: list[dict[str, Any]], like: Tree) -> None:
    saved = {leaf["path"]: (leaf["shape"], leaf["dtype"]) for leaf in leaves}
    wanted = {
        at: (list(leaf.shape), str(leaf.dtype))
        for at, leaf in zip(tree.paths(like), tree.leaves(like), strict=True)
    }
    for at in [*wanted, *saved]:
        if saved.get(at) != wanted.get(at):
            raise ValueError(
                f"restore expects {_say(wanted.get(at))} for {at!r}, got {_say(saved.get(at))} in "
                f"{path}."
            )


def _say(leaf: tuple[list[int], str] | None) -> str:
    return "nothing" if leaf is None else f"{leaf[1]} of shape {leaf[0]}"


def _to_tensor(array: Any, like: Tensor) -> Tensor:
    if like.dtype == torch.bfloat16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).to(like.device)
    return torch.from_numpy(array).to(like.device)


def _checksum(array: Any) -> int:
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _score(path: Path) -> float:
    try:
        score = _read_manifest(path).get("score")
    except CheckpointError:
        return -math.inf  # a broken checkpoint is not among the best
    return -math.inf if score is None else float(score)


def _write_synced(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make the names in a folder durable; orbax has synced the files that it wrote."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _orbax() -> Any:
    """Return a checkpointer; imported here because it takes seconds, which no other use needs."""
    fresh = "jax" not in sys.modules
    import jax
    import orbax.checkpoint as ocp

    if fresh:
        # Nobody else uses jax here, and on a GPU it would take most of the memory for itself.
        jax.config.update("jax_platforms", "cpu")  # type: ignore[no-untyped-call]  # (jax's own)
    return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
