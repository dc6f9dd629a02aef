"""GGUF files: metadata, tensors, and the shape of the model that the metadata describe.

GGUF's storage types: bytes [n, block_bytes] to numbers [n, block] in float32.

A block of 32 numbers (256 for the K types) shares a scale, and in some types an offset:
`x = scale * q + offset`. Layouts: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the
structs of ggml-common.h.

They are decoded by hand because `gguf.quants.dequantize` (0.19) computes the same bits in four to
eighteen times as long, and is not installed with funcrl alone.
"""

import struct
from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeAlias

import numpy
import torch
from torch import Tensor

from funcrl.core.files import brief, open_file
from funcrl.models import TransformerConfig
from funcrl.weights.tensors import Metadata, Stored, check_entry, check_number, plain


class Storage(NamedTuple):
    """How numbers of one type are stored."""

    name: str
    block: int
    block_bytes: int
    decode: Callable[[Tensor], Tensor]


def _half(raw: Tensor) -> Tensor:
    """Return two bytes [..., 2] as a float16, widened: [..., 1]."""
    return raw.contiguous().view(torch.float16).to(torch.float32)


def _nibbles(raw: Tensor) -> Tensor:
    """Return the low halves of bytes [n, b], then the high ones: [n, 2 b]."""
    return torch.cat([raw & 15, raw >> 4], dim=-1)


def _counting(count: int) -> Tensor:
    """Return 0, 1, 2 ... as bytes, where files are decoded."""
    return torch.arange(count, dtype=torch.uint8, device="cpu")


def _bits(raw: Tensor) -> Tensor:
    """Return the bits of bytes [n, b], the lowest of each first: [n, 8 b]."""
    return ((raw[..., None] >> _counting(8)) & 1).flatten(-2)


def _q4_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * (_nibbles(raw[:, 2:]).to(torch.float32) - 8)


def _q4_1(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * _nibbles(raw[:, 4:]).to(torch.float32) + _half(raw[:, 2:4])


def _q5_0(raw: Tensor) -> Tensor:
    whole = _nibbles(raw[:, 6:]) | (_bits(raw[:, 2:6]) << 4)
    return _half(raw[:, :2]) * (whole.to(torch.float32) - 16)


def _q5_1(raw: Tensor) -> Tensor:
    whole = _nibbles(raw[:, 8:]) | (_bits(raw[:, 4:8]) << 4)
    return _half(raw[:, :2]) * whole.to(torch.float32) + _half(raw[:, 2:4])


def _q8_0(raw: Tensor) -> Tensor:
    return _half(raw[:, :2]) * raw[:, 2:].contiguous().view(torch.int8).to(torch.float32)


def _scales_of_8(raw: Tensor) -> tuple[Tensor, Tensor]:
    """Return eight scales and eight offsets of 6 bits each from 12 bytes: [n, 8] twice."""
    low, middle, high = raw.split(4, dim=-1)
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], dim=-1)
    offsets = torch.cat([middle & 63, (high >> 4) | ((middle >> 6) << 4)], dim=-1)
    return scales.to(torch.float32), offsets.to(torch.float32)


def _scaled_by_8(raw: Tensor, whole: Tensor) -> Tensor:
    """Return eight runs of 32 numbers [n, 8, 32], each with its scale and offset: [n, 256]."""
    scales, offsets = _scales_of_8(raw[:, 4:16])
    scales, offsets = _half(raw[:, :2]) * scales, _half(raw[:, 2:4]) * offsets
    return (scales[..., None] * whole.to(torch.float32) - offsets[..., None]).flatten(1)


def _q4_k(raw: Tensor) -> Tensor:
    pairs = raw[:, 16:].unflatten(-1, (4, 32))  # a low and a high run in each 32 bytes
    return _scaled_by_8(raw, _nibbles(pairs).view(-1, 8, 32))


def _q5_k(raw: Tensor) -> Tensor:
    pairs = raw[:, 48:].unflatten(-1, (4, 32))
    # Bit r of byte j is the fifth bit of number j in run r.
    fifth = (raw[:, None, 16:48] >> _counting(8)[:, None]) & 1
    return _scaled_by_8(raw, _nibbles(pairs).view(-1, 8, 32) | (fifth << 4))


def _q6_k(raw: Tensor) -> Tensor:
    low, high = raw[:, :128].unflatten(-1, (2, 64)), raw[:, 128:192].unflatten(-1, (2, 1, 32))
    shifts = 2 * _counting(4)[:, None]
    top = ((high >> shifts) & 3) << 4  # [n, 2, 4, 32]
    whole = _nibbles(low).unflatten(-1, (4, 32)) | top
    scales = raw[:, 192:208].contiguous().view(torch.int8).to(torch.float32)
    scales = (_half(raw[:, 208:]) * scales).view(-1, 16, 1)
    return (scales * (whole.to(torch.float32) - 32).view(-1, 16, 16)).flatten(1)


# By the number that a GGUF file gives.
STORAGES: dict[int, Storage] = {
    0: Storage("F32", *plain(torch.float32)),
    1: Storage("F16", *plain(torch.float16)),
    2: Storage("Q4_0", 32, 18, _q4_0),
    3: Storage("Q4_1", 32, 20, _q4_1),
    6: Storage("Q5_0", 32, 22, _q5_0),
    7: Storage("Q5_1", 32, 24, _q5_1),
    8: Storage("Q8_0", 32, 34, _q8_0),
    12: Storage("Q4_K", 256, 144, _q4_k),
    13: Storage("Q5_K", 256, 176, _q5_k),
    14: Storage("Q6_K", 256, 210, _q6_k),
    30: Storage("BF16", *plain(torch.bfloat16)),
}


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
