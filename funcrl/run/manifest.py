"""Checks the fields of a checkpoint's manifest, which anybody can write with a right checksum."""

import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FIELDS = {"leaves": list, "checksums": list, "files": dict, "extra": dict}
_LEAF_FIELDS = {"path": str, "shape": list, "dtype": str}


def is_manifest(found: Mapping[str, Any]) -> bool:
    """Return whether a manifest has all its fields, each of its type."""
    if not _has(found, _FIELDS) or not isinstance(found.get("score", ()), int | float | None):
        return False
    sums, files, leaves = found["checksums"], found["files"], found["leaves"]
    return (
        len(sums) == len(leaves)
        and all(isinstance(each, int) for each in [*sums, *files.values()])
        and all(isinstance(leaf, dict) and _has(leaf, _LEAF_FIELDS) for leaf in leaves)
    )


def file_checksum(path: Path) -> int:
    """Return the checksum of a file, which may be larger than memory."""
    checksum = 0
    with path.open("rb") as file:
        while part := file.read(1 << 24):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _has(values: Mapping[str, Any], kinds: Mapping[str, type]) -> bool:
    return all(isinstance(values.get(name), kind) for name, kind in kinds.items())
