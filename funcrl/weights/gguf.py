"""GGUF files: metadata, tensors, and the shape of the model that the metadata describe.

They are read by hand because `gguf.GGUFReader` (0.19) takes more than 12 seconds for an array of a
million bytes in the metadata and for arrays longer than the file, accepts tensors that share bytes,
and waits for ever at a pipe (`tests/weights/test_weights_hostile.py` has these files).
"""

import struct
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy

from funcrl.core.files import brief, open_file
from funcrl.models import TransformerConfig
from funcrl.weights.quantized import STORAGES
from funcrl.weights.tensors import Metadata, Stored, check_entry, check_number

_Named: TypeAlias = tuple[str, Any, tuple[int, int]]  # a name, what it has, and its bytes

# Value types of the metadata, by number, as `struct` writes them.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
# In bytes, a tokenizer's vocabulary and merges among them; and a number of metadata.
_LONGEST_HEADER, _MOST_METADATA = 1 << 26, 1 << 16
_LARGEST_ALIGNMENT = 1 << 20
# Whether the rows of q and k are stored in the order of rotation by neighbours, not by halves.
BY_NEIGHBOURS = {"llama": True, "qwen2": False, "qwen3": False}
# Fields of `TransformerConfig` and their names.
SIZES = {
    "width": "embedding_length", "num_layers": "block_count", "num_heads": "attention.head_count",
    "num_kv_heads": "attention.head_count_kv", "head_width": "attention.key_length",
    "mlp_width": "feed_forward_length", "context_length": "context_length",
}  # fmt: skip
# Options that change the network, with the values under which they do not.
_PLAIN: dict[str, tuple[Any, ...]] = {
    "rope.scaling.type": ("none",),
    "rope.scaling.factor": (1, 0),  # 0 is llama.cpp's "not set"
    "rope.scaling.attn_factor": (1,),
    "rope.scale_linear": (1, 0),
    "attention.sliding_window": (0,),
    "attention.causal": (True,),
    "attention.scale": (0,),
    "logit_scale": (1, 0),
    "expert_count": (0,),
}


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int  # of `STORAGES`
    offset: int  # from where the numbers begin


class GGUF(NamedTuple):
    """A file's metadata and where its tensors lie."""

    metadata: dict[str, Any]
    tensors: dict[str, Stored]
    spans: dict[str, tuple[int, int]]  # the bytes of each of the metadata, its name among them


def read_gguf(path: Path) -> GGUF:
    """Return what a GGUF file holds; no tensor is read."""
    with _header_of(path) as header:
        return _read(path, header)


def read_metadata(path: Path) -> dict[str, Any]:
    """Return the metadata of a GGUF file, whatever its tensors are."""
    with _header_of(path) as header:
        values, _ = _read_metadata(path, header)
    return {key: value for key, value, _ in values}


@contextmanager
def _header_of(path: Path) -> Iterator["_Header"]:
    """Yield a file's header; say so where it turns out to be broken."""
    try:
        with open_file("load_params", path) as file:
            yield _Header(file, path.stat().st_size)
    except (EOFError, UnicodeDecodeError) as error:
        raise ValueError(
            f"load_params expects a whole GGUF file, got {path} with a broken header "
            f"({str(error)[:200]})."
        ) from error


def gguf_config(gguf: GGUF, path: Path) -> tuple[TransformerConfig, bool]:
    """Return the model's shape, and whether the rows of q and k are in another order."""
    kind, tensors = gguf.metadata.get("general.architecture"), gguf.tensors
    if kind not in tuple(BY_NEIGHBOURS):  # a list is none, and has no hash
        raise ValueError(
            f"load_params supports {', '.join(BY_NEIGHBOURS)}, got the architecture "
            f"{brief(kind)} in {path}; funcrl.functional takes any module of transformers."
        )
    fields = Metadata(gguf.metadata, str(path), f"{kind}.")
    embedding = tensors["token_embd.weight"].shape if "token_embd.weight" in tensors else ()
    config = fields.shape(
        SIZES,
        vocab_size=(*embedding, 1)[0],  # a file without an embedding is refused by its name
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        rope_theta=fields.get("rope.freq_base", float, 10_000.0),
        norm_eps=fields.get("attention.layer_norm_rms_epsilon", float),
        tied="output.weight" not in tensors,
    )
    fields.check(_PLAIN | {"rope.dimension_count": (config.head_width,)})
    return config, BY_NEIGHBOURS[kind]


class _Header:
    """A file's first bytes, read in order, and never more than it holds or a header may have."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._end, self.size = file, min(size, _LONGEST_HEADER), size

    def tell(self) -> int:
        """Return how many bytes have been read."""
        return self._file.tell()

    def take(self, count: int) -> bytes:
        """Return the next bytes."""
        left = self._end - self.tell()
        if count > left:
            raise EOFError(
                f"cut off, or longer than {_LONGEST_HEADER} bytes: {count} are to come, and "
                f"{left} do"
            )
        return self._file.read(count)

    def number(self, code: str) -> Any:
        """Return the next number, of a kind that `struct` knows."""
        return struct.unpack(f"<{code}", self.take(struct.calcsize(f"<{code}")))[0]

    def text(self) -> str:
        """Return the next text."""
        return self.take(self.number("Q")).decode("utf-8")


def _read(path: Path, header: _Header) -> GGUF:
    values, num_tensors = _read_metadata(path, header)
    metadata = {key: value for key, value, _ in values}
    entries = [_entry(path, header) for _ in range(num_tensors)]
    fields = Metadata(metadata, str(path))
    alignment = fields.at_most(_LARGEST_ALIGNMENT, "general.alignment", 32)
    data = -(-header.tell() // alignment) * alignment
    tensors = {entry.name: _stored(path, data, header.size, entry) for entry in entries}
    if (len(metadata), len(tensors)) != (len(values), num_tensors):
        raise ValueError(f"load_params expects each name once, got one twice in {path}.")
    _check_apart(path, tensors)
    return GGUF(metadata, tensors, {key: span for key, _, span in values})


def _read_metadata(path: Path, header: _Header) -> tuple[list[_Named], int]:
    """Return the metadata in order, and how many tensors are described after them."""
    magic, version = header.take(4), header.number("I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(
            f"load_params expects a GGUF file of version 2 or 3, got {path}, which begins with "
            f"{magic!r} and version {version}."
        )
    num_tensors, num_values = header.number("Q"), header.number("Q")
    check_number(path, num_tensors)
    if num_values > _MOST_METADATA:
        raise ValueError(
            f"load_params expects at most {_MOST_METADATA} metadata in {path}, got {num_values}."
        )
    values = []
    for _ in range(num_values):
        begin = header.tell()
        key = header.text()
        value = _value(header, header.number("I"), path)
        values.append((key, value, (begin, header.tell())))
    return values, num_tensors


def _check_apart(path: Path, tensors: dict[str, Stored]) -> None:
    """Raise if two tensors share bytes: a small file could stand for any number of large ones."""
    end = 0
    for name, stored in sorted(tensors.items(), key=lambda item: item[1].offset):
        if stored.offset < end:
            raise ValueError(
                f"load_params expects tensors that share no bytes, got {name!r} at byte "
                f"{stored.offset} of {path}, where another one ends at {end}."
            )
        end = stored.offset + stored.num_bytes


def _stored(path: Path, data: int, size: int, entry: _Entry) -> Stored:
    name, shape, kind, offset = entry
    if kind not in STORAGES:
        known = ", ".join(storage.name for storage in STORAGES.values())
        raise ValueError(
            f"load_params expects tensors stored as {known}, got type number {kind} for {name!r} "
            f"in {path}."
        )
    storage = STORAGES[kind]
    stored = Stored(path, data + offset, shape, storage.block, storage.block_bytes, storage.decode)
    if shape and shape[-1] % storage.block:
        raise ValueError(
            f"load_params expects rows of a multiple of {storage.block} for {storage.name}, got "
            f"{list(shape)} for {name!r} in {path}."
        )
    if stored.offset + stored.num_bytes > size:
        raise ValueError(
            f"load_params expects {path} to hold {stored.offset + stored.num_bytes} bytes, got "
            f"{size}: it is cut off."
        )
    return stored


def _entry(path: Path, header: _Header) -> _Entry:
    name, count = header.text(), header.number("I")
    check_entry(path, name, count, ())
    shape = tuple(header.number("Q") for _ in range(count))[::-1]  # the fastest axis comes first
    check_entry(path, name, count, shape)
    return _Entry(name, shape, header.number("I"), header.number("Q"))


def _value(header: _Header, kind: int, path: Path) -> Any:
    if kind == _FLOAT:  # the decimal that was meant: 1e-5, not 9.999999747378752e-06
        return float(str(numpy.float32(header.number("f"))))
    if kind in _SCALARS:
        return header.number(_SCALARS[kind])
    if kind == _STRING:
        return header.text()
    if kind != _ARRAY:
        raise ValueError(f"load_params expects known metadata, got type {kind} in {path}.")
    inner, count = header.number("I"), header.number("Q")
    if inner in _SCALARS:  # as they are: a list of Python's numbers is ten times as large
        numbers = array("B" if inner == _BOOL else _SCALARS[inner])
        numbers.frombytes(header.take(count * numbers.itemsize))
        return numbers
    if inner != _STRING:  # llama.cpp reads no arrays of arrays either
        raise ValueError(f"load_params expects known metadata, got arrays of {inner} in {path}.")
    return [header.text() for _ in range(count)]
