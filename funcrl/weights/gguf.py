"""GGUF files: metadata, tensors, and what the metadata say about the model."""

import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy

from funcrl.models import TransformerConfig
from funcrl.weights.described import Described
from funcrl.weights.quantized import STORAGES
from funcrl.weights.tensors import Stored

# Value types of the metadata, by number, as `struct` writes them.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_FLOAT, _STRING, _ARRAY = 6, 8, 9
# Whether the rows of q and k are stored in the order of rotation by neighbours, not by halves.
BY_NEIGHBOURS = {"llama": True, "qwen2": False, "qwen3": False}
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
    """Return what a GGUF file holds; no tensor is read.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl.weights.gguf import read_gguf
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "model.gguf"
        >>> _ = path.write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + bytes(16))
        >>> read_gguf(path).tensors
        {}
    """
    try:
        with path.open("rb") as file:
            return _read(path, file)
    except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
        raise ValueError(
            f"load_params expects a whole GGUF file, got {path} with a broken header ({error})."
        ) from error


def gguf_config(gguf: GGUF, path: Path) -> tuple[TransformerConfig, bool]:
    """Return the model's shape, and whether the rows of q and k are in another order.

    Args:
        gguf: the file's content.
        path: for errors.

    Example:
        >>> import pathlib
        >>> from funcrl.weights.gguf import GGUF, gguf_config
        >>> gguf_config(GGUF({"general.architecture": "gemma"}, {}, {}), pathlib.Path("a.gguf"))
        Traceback (most recent call last):
        ValueError: load_params supports llama, qwen2, qwen3, got the architecture 'gemma' in \
a.gguf; funcrl.functional takes any module of transformers.
    """
    kind, tensors = gguf.metadata.get("general.architecture"), gguf.tensors
    if kind not in tuple(BY_NEIGHBOURS):  # a list is none, and has no hash
        raise ValueError(
            f"load_params supports {', '.join(BY_NEIGHBOURS)}, got the architecture {kind!r} in "
            f"{path}; funcrl.functional takes any module of transformers."
        )
    said = Described(gguf.metadata, str(path), f"{kind}.")
    width, num_heads = said.get("embedding_length", int), said.get("attention.head_count", int)
    head_width = said.get("attention.key_length", int, max(width // num_heads, 1))
    said.check(_PLAIN | {"rope.dimension_count": (head_width,)})
    embedding = tensors["token_embd.weight"].shape if "token_embd.weight" in tensors else ()
    config = said.shape(
        vocab_size=(*embedding, 1)[0],  # a file without an embedding is refused by its name
        width=width,
        num_layers=said.get("block_count", int),
        num_heads=num_heads,
        num_kv_heads=said.get("attention.head_count_kv", int, num_heads),
        head_width=head_width,
        mlp_width=said.get("feed_forward_length", int),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        rope_theta=said.get("rope.freq_base", float, 10_000.0),
        norm_eps=said.get("attention.layer_norm_rms_epsilon", float),
        tied="output.weight" not in tensors,
        context_length=said.get("context_length", int),
    )
    return config, BY_NEIGHBOURS[kind]


def _read(path: Path, file: BinaryIO) -> GGUF:
    magic, version = file.read(4), _number(file, "I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(
            f"load_params expects a GGUF file of version 2 or 3, got {path}, which begins with "
            f"{magic!r} and version {version}."
        )
    num_tensors, num_values = _number(file, "Q"), _number(file, "Q")
    metadata, spans = {}, {}
    for _ in range(num_values):
        begin = file.tell()
        key = _string(file)
        metadata[key] = _value(file, _number(file, "I"), path)
        spans[key] = begin, file.tell()
    entries = [_entry(file) for _ in range(num_tensors)]
    alignment = Described(metadata, str(path)).get("general.alignment", int, 32)
    data = -(-file.tell() // alignment) * alignment
    size = path.stat().st_size
    tensors = {entry.name: _stored(path, data, size, entry) for entry in entries}
    if (len(metadata), len(tensors)) != (num_values, num_tensors):
        raise ValueError(f"load_params expects each name once, got one twice in {path}.")
    return GGUF(metadata, tensors, spans)


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


def _entry(file: BinaryIO) -> _Entry:
    name, count = _string(file), _number(file, "I")
    shape = tuple(_number(file, "Q") for _ in range(count))[::-1]  # the fastest axis comes first
    return _Entry(name, shape, _number(file, "I"), _number(file, "Q"))


def _value(file: BinaryIO, kind: int, path: Path) -> Any:
    if kind == _FLOAT:  # the decimal that was meant: 1e-5, not 9.999999747378752e-06
        return float(str(numpy.float32(_number(file, "f"))))
    if kind in _SCALARS:
        return _number(file, _SCALARS[kind])
    if kind == _STRING:
        return _string(file)
    if kind != _ARRAY:
        raise ValueError(f"load_params expects known metadata, got type {kind} in {path}.")
    inner, count = _number(file, "I"), _number(file, "Q")
    if inner in _SCALARS:
        code = f"<{count}{_SCALARS[inner]}"
        return list(struct.unpack(code, file.read(struct.calcsize(code))))
    if inner != _STRING:  # llama.cpp reads no arrays of arrays either
        raise ValueError(f"load_params expects known metadata, got arrays of {inner} in {path}.")
    return [_value(file, inner, path) for _ in range(count)]


def _number(file: BinaryIO, code: str) -> Any:
    size = struct.calcsize(f"<{code}")
    return struct.unpack(f"<{code}", file.read(size))[0]


def _string(file: BinaryIO) -> str:
    length = _number(file, "Q")
    raw = file.read(min(length, 1 << 31))
    if len(raw) != length:
        raise struct.error("a text is cut off")
    return raw.decode("utf-8")
