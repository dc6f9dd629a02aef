"""The manifest of a checkpoint: the paths, shapes, dtypes and checksums of its leaves, and facts.

The checksums are funcrl's own because orbax (0.12.8) keeps none that it compares: of 150 files with
a flipped bit it restored 38 to other numbers without an error (13 with OCDBT).
"""

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from funcrl.core import checks, tree
from funcrl.core.reading import brief
from funcrl.core.types import Tree

Manifest: TypeAlias = dict[str, Any]

STATE, MANIFEST = "state", "manifest.json"  # what a checkpoint's folder has
_FORMAT = "funcrl checkpoint 2"
_FIELDS = {"leaves": list, "checksums": list, "files": dict, "extra": dict}
_LEAF_FIELDS = {"path": str, "shape": list, "dtype": str}


def describe(
    state: Tree, extra: Mapping[str, Any] | None, score: float | None, beside: Sequence[Tree] = ()
) -> Manifest:
    """Return the manifest of a state that is not yet written, so without checksums.

    Args:
        state: the tree that `restore` returns.
        extra: facts.
        score: by which the best are kept.
        beside: further trees, which only a run asks for.
    """
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
    if version != _FORMAT:
        raise ValueError(f"has the format {brief(version)} and not {_FORMAT!r}")
    if not _has_all_fields(manifest):
        raise ValueError("has other fields than funcrl writes")
    return dict(manifest)


def array_checksum(array: Any) -> int:
    """Return the checksum of an array's numbers."""
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


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
    return (
        len(sums) == len(leaves)
        and all(isinstance(each, int) for each in [*sums, *files.values()])
        and all(isinstance(leaf, dict) and _has(leaf, _LEAF_FIELDS) for leaf in leaves)
    )


def _has(values: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(values.get(name), kind) for name, kind in kinds.items())


def _leaf_words(leaf: dict[str, Any] | None) -> str:
    return "nothing" if leaf is None else f"{leaf['dtype'][:50]} of shape {brief(leaf['shape'])}"
