"""One checkpoint on its way to the disk: a draft under a hidden name, which a rename commits."""

import os
import re
import shutil
from pathlib import Path
from typing import Any

from funcrl.core import tree
from funcrl.core.arrays import to_array
from funcrl.core.files import sync
from funcrl.core.types import Tree
from funcrl.run.manifest import MANIFEST, STATE, Manifest, array_checksum, encode, file_checksums
from funcrl.run.storage import write_arrays


def to_arrays(state: Tree) -> dict[str, Any]:
    """Return the leaves as arrays by number; on a CPU they share the tensors' memory."""
    return {str(index): to_array(leaf) for index, leaf in enumerate(tree.leaves(state))}


def write(path: Path, manifest: Manifest, arrays: dict[str, Any]) -> None:
    """Write a checkpoint; an old one of that name stays until all of it is on disk.

    Args:
        path: the folder to make.
        manifest: without checksums.
        arrays: the leaves by number.
    """
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
        # An array without elements is not stored; the manifest alone brings it back.
        filled = {name: array for name, array in arrays.items() if array.size}
        if filled:
            write_arrays(draft / STATE, filled)
        text = encode(manifest | {"checksums": sums, "files": file_checksums(draft, STATE)})
        (draft / MANIFEST).write_text(text, encoding="utf-8")
        # orbax syncs the data that it writes, but neither its metadata nor its folders.
        for written in [*draft.rglob("*"), draft]:
            sync(written)
        _replace(path, draft)
    except Exception as error:
        raise OSError(
            f"save could not write {path}: {_reason(error)}; older ones are whole."
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def clean_up(folder: Path, name: str = r"\d+") -> None:
    """Remove the drafts of killed processes, and rename back what they were replacing.

    Args:
        folder: of the checkpoints.
        name: a regular expression of theirs.
    """
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
