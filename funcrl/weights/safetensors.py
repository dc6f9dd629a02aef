"""The safetensors format: eight bytes of length, a JSON header, the numbers."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrl.runs import whole_file
from funcrl.weights.tensors import Stored, plain

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
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
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: _stored(path, 8 + length, name, entry) for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, _Refused):
            raise ValueError(str(error)) from None
        raise ValueError(
            f"load_params expects a safetensors file, got {path} with a broken header ({error!r})."
        ) from error


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
        if tensor.dtype not in _NAMES:
            raise TypeError(
                f"save_params expects parameters of {', '.join(map(str, _NAMES))}, got "
                f"{tensor.dtype} for {name!r}."
            )
        end = offset + tensor.numel() * tensor.element_size()
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [offset, end]}  # fmt: skip
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that every number is aligned
    with whole_file(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.writelines(_bytes(tensor))


class _Refused(ValueError):
    """An error whose message says it all."""


def _stored(path: Path, data: int, name: str, entry: Mapping[str, Any]) -> Stored:
    begin, end = entry["data_offsets"]
    if entry["dtype"] not in _DTYPES:
        raise _Refused(
            f"load_params expects weights of {', '.join(_DTYPES)}, got {entry['dtype']} for "
            f"{name!r} in {path}."
        )
    shape = tuple(int(length) for length in entry["shape"])
    stored = Stored(path, data + int(begin), shape, *plain(_DTYPES[entry["dtype"]]))
    if min(shape, default=1) < 0 or stored.num_bytes != end - begin:
        raise _Refused(
            f"load_params expects {stored.num_bytes} bytes for {name!r} of shape {list(shape)}, "
            f"got {end - begin} in {path}."
        )
    if begin < 0 or stored.offset + stored.num_bytes > path.stat().st_size:
        raise _Refused(
            f"load_params expects {path} to hold {stored.offset + stored.num_bytes} bytes, got "
            f"{path.stat().st_size}: it is cut off."
        )
    return stored


def _bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Give a tensor's bytes a slice at a time, so that no whole copy is made."""
    rows = tensor.detach().reshape(-1)
    for part in rows.split(1 << 22):
        yield part.cpu().contiguous().view(torch.uint8).numpy().data
