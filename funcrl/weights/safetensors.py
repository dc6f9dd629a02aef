"""The safetensors format: eight bytes of length, a JSON header, the numbers."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrl.runs import whole_file
from funcrl.weights.tensors import Stored, as_bytes, plain

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in _DTYPES.items()}
# As in the format's own reader: a longer header is not a header.
_LONGEST_HEADER = 100_000_000


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Return where each tensor of a file lies; nothing is read but the header.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from funcrl.weights.safetensors import read_safetensors, write_safetensors
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> write_safetensors(path, {"w": torch.zeros(2, 3)})
        >>> read_safetensors(path)["w"].shape
        (2, 3)
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER):
            raise ValueError(
                f"load_params expects a safetensors file, got {path} of {size} bytes, whose header "
                f"would be {length} bytes long: it is cut off, or another format."
            )
        raw = file.read(length)
    try:
        header = json.loads(raw, object_pairs_hook=_each_once)
        header.pop("__metadata__", None)
        found = {name: _stored(path, 8 + length, name, entry) for name, entry in header.items()}
    except _Refused as error:
        raise ValueError(str(error)) from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"load_params expects a safetensors file, got {path} with a broken header ({error!r})."
        ) from error
    _check_cover(path, found, 8 + length, size)
    return found


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a file that is there whole or not at all.

    Example:
        >>> import pathlib, tempfile, torch
        >>> from funcrl.weights.safetensors import write_safetensors
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.safetensors"
        >>> write_safetensors(path, {"w": torch.zeros(2, 3)})
        >>> path.exists()
        True
    """
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


class _Refused(ValueError):
    """An error whose message says it all."""


def _stored(path: Path, data: int, name: str, entry: Mapping[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if any(type(each) is not int or each < 0 for each in (begin, end, *shape)):
        raise TypeError(f"{name!r} has {shape} at {begin, end}")
    if entry["dtype"] not in _DTYPES:
        raise _Refused(
            f"load_params expects weights of {', '.join(_DTYPES)}, got {entry['dtype']} for "
            f"{name!r} in {path}."
        )
    stored = Stored(path, data + begin, shape, *plain(_DTYPES[entry["dtype"]]))
    if stored.num_bytes != end - begin:
        raise _Refused(
            f"load_params expects {stored.num_bytes} bytes for {name!r} of shape {list(shape)}, "
            f"got {end - begin} in {path}."
        )
    return stored


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError("a name is there twice")
    return dict(pairs)


def _check_cover(path: Path, found: Mapping[str, Stored], end: int, size: int) -> None:
    """Raise unless the tensors lie end to end until the file's end, as the format wants it."""
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
