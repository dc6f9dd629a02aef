"""GGUF files: metadata, tensors, and what the metadata say about the model."""

import struct
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from funcrl.models import TransformerConfig
from funcrl.weights.quantized import STORAGES
from funcrl.weights.tensors import Stored

# Value types of the metadata, by number, as `struct` writes them.
_SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
# Whether the rows of q and k are stored in the order of rotation by neighbours, not by halves.
_ARCHITECTURES = {"llama": True, "qwen2": False, "qwen3": False}


class _Entry(NamedTuple):
    name: str
    shape: tuple[int, ...]
    kind: int  # of `STORAGES`
    offset: int  # from where the numbers begin


class GGUF(NamedTuple):
    """A file's metadata and where its tensors lie."""

    metadata: dict[str, Any]
    tensors: dict[str, Stored]


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
        >>> gguf_config(GGUF({"general.architecture": "gemma"}, {}), pathlib.Path("a.gguf"))
        Traceback (most recent call last):
        ValueError: load_params supports llama, qwen2, qwen3, got the architecture 'gemma' in \
a.gguf; funcrl.functional takes any module of transformers.
    """
    metadata = gguf.metadata
    kind = metadata.get("general.architecture")
    if kind not in _ARCHITECTURES:
        raise ValueError(
            f"load_params supports {', '.join(_ARCHITECTURES)}, got the architecture {kind!r} in "
            f"{path}; funcrl.functional takes any module of transformers."
        )

    def value(name: str, default: Any = None) -> Any:
        found = metadata.get(f"{kind}.{name}", default)
        if found is None:
            raise ValueError(f"load_params expects {kind}.{name} in {path}, got none.")
        return found

    if value("rope.scaling.type", "none") != "none":
        raise ValueError(
            f"load_params supports plain rotary positions, got rope.scaling.type "
            f"{value('rope.scaling.type')!r} in {path}."
        )
    width, num_heads = value("embedding_length"), value("attention.head_count")
    tensors = gguf.tensors
    config = TransformerConfig(
        vocab_size=tensors["token_embd.weight"].shape[0] if "token_embd.weight" in tensors else 1,
        width=width,
        num_layers=value("block_count"),
        num_heads=num_heads,
        num_kv_heads=value("attention.head_count_kv", num_heads),
        head_width=value("attention.key_length", width // num_heads),
        mlp_width=value("feed_forward_length"),
        qk_norm="blk.0.attn_q_norm.weight" in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        rope_theta=value("rope.freq_base", 10_000.0),
        norm_eps=value("attention.layer_norm_rms_epsilon"),
        tied="output.weight" not in tensors,
        context_length=value("context_length"),
    )
    return config, _ARCHITECTURES[kind]


def _read(path: Path, file: BinaryIO) -> GGUF:
    magic, version = file.read(4), _number(file, "I")
    if magic != b"GGUF" or version not in (2, 3):
        raise ValueError(
            f"load_params expects a GGUF file of version 2 or 3, got {path}, which begins with "
            f"{magic!r} and version {version}."
        )
    num_tensors, num_values = _number(file, "Q"), _number(file, "Q")
    metadata = {}
    for _ in range(num_values):
        key = _string(file)
        metadata[key] = _value(file, _number(file, "I"), path)
    entries = [_entry(file) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    data = -(-file.tell() // alignment) * alignment
    size = path.stat().st_size
    return GGUF(metadata, {entry.name: _stored(path, data, size, entry) for entry in entries})


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
