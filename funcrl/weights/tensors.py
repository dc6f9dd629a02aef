"""A model in a file: its description, where each tensor lies, and how bytes become numbers."""

import math
import mmap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from funcrl.core.files import brief, open_file
from funcrl.models import LARGEST, TransformerConfig

_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer above 0", lambda value: type(value) is int and value > 0),
    float: (
        "a finite number above 0",
        lambda value: type(value) in (int, float) and 0 < value < math.inf,
    ),
    bool: ("true or false", lambda value: type(value) is bool),
}


class UnsupportedNetwork(ValueError):
    """A file describes a network that is not funcrl's, but may be one of transformers."""


class UnsupportedOption(ValueError):
    """A description has an option under which the network is another."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Metadata(NamedTuple):
    """Values by name, which are checked as they are read."""

    values: Mapping[str, Any]
    place: str
    prefix: str = ""  # of every name

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a value of a kind; without a default it must be there."""
        found = self.values.get(self.prefix + name, default)
        what, fits = _KINDS[kind]
        if not fits(found):
            raise ValueError(
                f"load_params expects {self.prefix}{name} in {self.place} to be {what}, got "
                f"{brief(found)}."
            )
        return found

    def value(self, name: str) -> Any:
        """Return a value as it is, None if there is none."""
        return self.values.get(self.prefix + name)

    def inside(self, name: str) -> "Metadata":
        """Return the values of an object among these: none if it is absent or null."""
        found = self.value(name)
        if found is not None and not isinstance(found, dict):
            raise ValueError(
                f"load_params expects an object as {self.prefix}{name} in {self.place}, got "
                f"{brief(found)}."
            )
        prefix = f"{self.prefix}{name}."
        return Metadata(
            {prefix + key: each for key, each in (found or {}).items()}, self.place, prefix
        )

    def size(self, name: str, field: str, default: int | None = None) -> int:
        """Return a value for a field of `TransformerConfig`, no larger than such a field may be."""
        return self.at_most(LARGEST[field], name, default)

    def at_most(self, most: int, name: str, default: int | None = None) -> int:
        """Return an integer from 1 to `most`; without a default it must be there."""
        found: int = self.get(name, int, default)
        if found > most:
            raise ValueError(
                f"load_params expects {self.prefix}{name} in {self.place} to be at most {most}, "
                f"got {found}."
            )
        return found

    def check(self, plain: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise unless each value is absent or one that leaves the network as it is here."""
        for name, allowed in plain.items():
            found = self.values.get(self.prefix + name, allowed[0])
            if found not in allowed:
                raise UnsupportedOption(
                    # What may not be there at all is a contradiction, and no other network's.
                    name if allowed[0] is not None else "",
                    f"load_params supports {self.prefix}{name} {allowed[0]!r}, got "
                    f"{brief(found)} in {self.place}.",
                )

    def shape(self, sizes: Mapping[str, str], **others: Any) -> TransformerConfig:
        """Return a shape: its sizes by their names here, and its other fields as they are given."""
        width, num_heads = (self.size(sizes[field], field) for field in ("width", "num_heads"))
        defaults = {"num_kv_heads": num_heads, "head_width": max(width // num_heads, 1)}
        fields: dict[str, Any] = {
            field: self.size(name, field, defaults.get(field)) for field, name in sizes.items()
        }
        try:
            return TransformerConfig(**fields, **others)
        except ValueError as error:
            raise ValueError(
                f"load_params expects the shape of a model in {self.place}, got: {error}"
            ) from error


# Of a file of safetensors, and of the JSON beside it, in bytes: of models that are supported the
# longest have some hundreds of kilobytes.
LONGEST_HEADER = 1 << 25
_MOST_TENSORS, _LONGEST_NAME, _MOST_DIMENSIONS = 1 << 16, 1000, 5
# Numbers decoded at a time: what a load needs besides the parameters themselves.
_AT_ONCE = 1 << 18


class Stored(NamedTuple):
    """A tensor in a file."""

    path: Path
    offset: int  # of its first byte
    shape: tuple[int, ...]
    block: int  # numbers that are stored together
    block_bytes: int
    decode: Callable[[Tensor], Tensor]  # [n, block_bytes] uint8 -> [n, block]

    @property
    def num_bytes(self) -> int:
        """Its length in the file."""
        return math.prod(self.shape) // self.block * self.block_bytes


def check_number(path: Path, count: int) -> None:
    """Raise if a file has more tensors than the largest model."""
    if count > _MOST_TENSORS:
        raise ValueError(
            f"load_params expects at most {_MOST_TENSORS} tensors in {path}, got {count}."
        )


def check_entry(path: Path, name: str, num_dimensions: int, shape: tuple[int, ...]) -> None:
    """Raise unless a tensor has a name and dimensions that a parameter may have.

    `num_dimensions` is what the file says: more than five are not read, and `shape` is then empty.
    """
    if len(name) > _LONGEST_NAME:
        raise ValueError(
            f"load_params expects tensors with names of at most {_LONGEST_NAME} characters, got "
            f"{len(name)} for {brief(name)} in {path}."
        )
    if num_dimensions > _MOST_DIMENSIONS:
        raise ValueError(
            f"load_params expects tensors of at most {_MOST_DIMENSIONS} dimensions, got "
            f"{num_dimensions} for {name!r} in {path}."
        )
    if not all(shape):
        raise ValueError(
            f"load_params expects tensors with numbers in them, got the shape {list(shape)} for "
            f"{name!r} in {path}."
        )


def read_tensor(stored: Stored, dtype: torch.dtype) -> Tensor:
    """Return a stored tensor in a dtype, decoded slice by slice from a mapping of the file.

    No more than the result and a few megabytes is alive.
    """
    out = torch.empty(stored.shape, dtype=dtype, device="cpu")
    flat = out.view(-1)
    blocks = flat.numel() // stored.block
    at_once = max(_AT_ONCE // stored.block, 1)
    with stored.path.open("rb") as file:
        for first in range(0, blocks, at_once):
            count = min(at_once, blocks - first)
            part = flat[first * stored.block : (first + count) * stored.block]
            _decode_into(part, stored, file.fileno(), first, count)
    return out


def plain(dtype: torch.dtype) -> tuple[int, int, Callable[[Tensor], Tensor]]:
    """Return the last three fields of `Stored` for numbers that are stored as they are."""
    return 1, dtype.itemsize, lambda raw: raw.view(dtype)


def as_bytes(tensor: Tensor) -> Iterator[memoryview]:
    """Give a tensor's bytes a slice at a time, so that no whole copy is made."""
    for part in tensor.detach().reshape(-1).split(1 << 22):
        yield part.cpu().contiguous().view(torch.uint8).numpy().data


def same_bytes(one: Stored, other: Stored) -> bool:
    """Return whether two tensors in files are the same numbers, stored alike."""
    if (one.shape, one.num_bytes) != (other.shape, other.num_bytes):
        return False
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        for begin in range(0, one.num_bytes, 1 << 22):
            size = min(1 << 22, one.num_bytes - begin)
            if first.read(size) != second.read(size):
                return False
    return True


def _decode_into(out: Tensor, stored: Stored, file: int, first: int, count: int) -> None:
    start = stored.offset + first * stored.block_bytes
    # A mapping begins at a multiple of the page size.
    before = start % mmap.ALLOCATIONGRANULARITY
    size = count * stored.block_bytes
    # A private copy on write, because torch takes no memory that it may not write to.
    with mmap.mmap(file, before + size, access=mmap.ACCESS_COPY, offset=start - before) as mapped:
        raw = torch.frombuffer(mapped, dtype=torch.uint8, count=size, offset=before)
        if before % 8:  # numbers may lie anywhere in a file, but not in memory
            raw = raw.clone()
        numbers = stored.decode(raw.view(count, stored.block_bytes)).reshape(-1)
        out.copy_(numbers)
        fits = out.isfinite().all() or torch.equal(out.isfinite(), numbers.isfinite())
        del numbers
        del raw  # the mapping cannot be closed while a tensor looks at it
    if not fits:
        raise ValueError(
            f"load_params expects numbers that {out.dtype} can hold, got larger ones in "
            f"{stored.path}; load them in another dtype."
        )


_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in _DTYPES.items()}  # of dtypes that are read and written


def read_safetensors(path: Path) -> dict[str, Stored]:
    """Return where each tensor of a file lies; only the header is read.

    The package checks the header, and that tensors lie end to end until the end of the file.
    """
    size = path.stat().st_size
    with open_file("load_params", path) as file:
        length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > min(size - 8, LONGEST_HEADER):
        raise ValueError(
            f"load_params expects a safetensors file, got {path} of {size} bytes, whose header "
            f"would be {length} bytes long: it is cut off, or another format."
        )
    found: dict[str, Stored] = {}
    offset = 8 + length
    try:
        with safe_open(path, "pt") as opened:
            names = opened.offset_keys()
            check_number(path, len(names))
            for name in names:
                part = opened.get_slice(name)
                shape, dtype = tuple(part.get_shape()), part.get_dtype()
                check_entry(path, name, len(shape), shape)
                if dtype not in _DTYPES:
                    raise ValueError(
                        f"load_params expects weights of {', '.join(_DTYPES)}, got {brief(dtype)} "
                        f"for {name!r} in {path}."
                    )
                found[name] = Stored(path, offset, shape, *plain(_DTYPES[dtype]))
                offset += found[name].num_bytes
    except SafetensorError as error:
        raise ValueError(
            f"load_params expects a whole safetensors file, got {path}: {str(error)[:200]}."
        ) from error
    return found


def write_safetensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a new file; who moves it into place waits until it is on the disk."""
    whole = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
    save_file(whole, path, {"format": "pt"})
