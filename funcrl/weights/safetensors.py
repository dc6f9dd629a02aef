"""The safetensors format: eight bytes of length, a JSON header, the numbers.

It is read and written by hand because the package is not installed with funcrl alone, reads headers
of 100 MB and of 400,000 tensors (for 283 MB of memory), and waits for ever at a pipe.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrl.core.files import brief, open_file, parse_json, whole_file
from funcrl.weights.tensors import (
    LONGEST_HEADER,
    Stored,
    as_bytes,
    check_entry,
    check_number,
    plain,
)

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Return where each tensor of a file lies; only the header is read."""
    size = path.stat().st_size
    with open_file("load_params", path) as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, LONGEST_HEADER):
            raise ValueError(
                f"load_params expects a safetensors file, got {path} of {size} bytes, whose header "
                f"would be {length} bytes long: it is cut off, or another format."
            )
        raw = file.read(length)
    header = _header(path, raw)
    check_number(path, len(header))
    found = {name: _stored(path, 8 + length, name, entry) for name, entry in header.items()}
    _check_cover(path, found, 8 + length, size)
    return found


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a file that is there whole or not at all."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, end]}  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that every number is aligned
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.writelines(as_bytes(tensor))


def _header(path: Path, raw: bytes) -> dict[str, Any]:
    """Return the header's entry of each tensor."""
    try:
        header = parse_json(raw.decode("utf-8"), _each_once)
    except ValueError as error:
        raise _broken(path, str(error)[:200]) from error
    if not isinstance(header, dict):
        raise _broken(path, f"{type(header).__name__} in place of an object")
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def _stored(path: Path, data: int, name: str, entry: Any) -> Stored:
    fields = entry if isinstance(entry, dict) else {}
    dtype, shape = fields.get("dtype"), _counts(fields.get("shape"))
    offsets = _counts(fields.get("data_offsets"))
    if shape is None or offsets is None or len(offsets) != 2:
        raise _broken(path, f"{brief(name)} has {brief(entry)}")
    check_entry(path, name, len(shape), shape)
    if dtype not in tuple(_DTYPES):  # a list is none, and has no hash
        raise ValueError(
            f"load_params expects weights of {', '.join(_DTYPES)}, got {brief(dtype)} for "
            f"{name!r} in {path}."
        )
    begin, end = offsets
    stored = Stored(path, data + begin, shape, *plain(_DTYPES[dtype]))
    if stored.num_bytes != end - begin:
        raise ValueError(
            f"load_params expects {stored.num_bytes} bytes for {name!r} of shape {list(shape)}, "
            f"got {end - begin} in {path}."
        )
    return stored


def _counts(values: Any) -> tuple[int, ...] | None:
    """Return a list of integers from 0 on, None for anything else."""
    if not isinstance(values, list):
        return None
    return tuple(values) if all(type(each) is int and each >= 0 for each in values) else None


def _broken(path: Path, reason: str) -> ValueError:
    return ValueError(
        f"load_params expects a safetensors file, got {path} with a broken header ({reason})."
    )


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _check_cover(path: Path, found: Mapping[str, Stored], end: int, size: int) -> None:
    """Raise unless the tensors lie end to end until the file's end, as the format requires."""
    for name, stored in sorted(found.items(), key=lambda item: (item[1].offset, item[1].num_bytes)):
        if stored.offset != end:
            raise ValueError(
                f"load_params expects tensors end to end, got {name!r} at byte {stored.offset} "
                f"of {path}, where {end} is next."
            )
        end += stored.num_bytes
    if end != size:
        raise ValueError(
            f"load_params expects {path} to hold {end} bytes, got {size}: "
            f"{'it is cut off' if size < end else 'something else follows'}."
        )
