"""GGUF files, written as llama.cpp's converter writes them, but not quantised."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from funcrl.core.files import whole_file
from funcrl.models import TransformerConfig
from funcrl.weights.gguf import BY_NEIGHBOURS, SIZES
from funcrl.weights.hugging_face import family_of
from funcrl.weights.load import is_rotated, regrouped
from funcrl.weights.names import translate
from funcrl.weights.tensors import as_bytes

# By dtype: the number of the storage, and that of a file that is mostly of it.
GGUF_DTYPES = {torch.float32: (0, 0), torch.float16: (1, 1), torch.bfloat16: (30, 32)}
_ALIGNMENT = 32  # of each tensor; what a reader assumes


def gguf_architecture(config: TransformerConfig) -> str:
    """Return the name of a network's architecture in GGUF files."""
    family = family_of(config)
    if family.model_type not in BY_NEIGHBOURS:
        raise ValueError(
            f"save_params supports {', '.join(BY_NEIGHBOURS)} in a .gguf file, got a network of "
            f"{family.architecture}: save a folder, which llama.cpp's convert_hf_to_gguf.py reads."
        )
    return family.model_type


def write_gguf(
    path: Path,
    config: TransformerConfig,
    params: Mapping[str, Tensor],
    tokenizer: Sequence[bytes] = (),
) -> None:
    """Write a model to a GGUF file that is there whole or not at all.

    The parameters are of one dtype among `GGUF_DTYPES`; vectors are always written in float32, as
    llama.cpp wants them. `tokenizer` are metadata as they are in another file.
    """
    dtype = next(iter(params.values())).dtype
    metadata = [
        _key(name) + _value(value) for name, value in _metadata(path, config, dtype).items()
    ]
    header, offset = [], 0
    for name, leaf in params.items():
        kind = torch.float32 if leaf.ndim == 1 else dtype
        shape = leaf.shape[::-1]  # the fastest axis comes first
        header.append(_key(str(translate(name).gguf)) + struct.pack(
            f"<I{len(shape)}QIQ", len(shape), *shape, GGUF_DTYPES[kind][0], offset
        ))  # fmt: skip
        offset += _padded(leaf.numel() * kind.itemsize)
    with whole_file(path) as file:
        counts = struct.pack("<IQQ", 3, len(params), len(metadata) + len(tokenizer))
        file.writelines([b"GGUF", counts, *metadata, *tokenizer, *header])
        file.write(bytes(_padded(file.tell()) - file.tell()))
        for name, leaf in params.items():
            file.writelines(_numbers(name, leaf, config))
            file.write(bytes(_padded(file.tell()) - file.tell()))


def _metadata(path: Path, config: TransformerConfig, dtype: torch.dtype) -> dict[str, Any]:
    kind = gguf_architecture(config)
    described = {
        **{name: getattr(config, field) for field, name in SIZES.items()},
        "attention.value_length": config.head_width,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "rope.freq_base": float(config.rope_theta),
        "rope.dimension_count": config.head_width,
        "vocab_size": config.vocab_size,
    }
    general = {
        "general.architecture": kind,
        "general.name": path.stem,
        "general.file_type": GGUF_DTYPES[dtype][1],
    }
    return general | {f"{kind}.{name}": value for name, value in described.items()}


def _numbers(name: str, leaf: Tensor, config: TransformerConfig) -> Iterable[memoryview]:
    if leaf.ndim == 1:
        leaf = leaf.to(torch.float32)
    if BY_NEIGHBOURS[gguf_architecture(config)] and is_rotated(name):
        # Rotation shall pair (2 i, 2 i + 1), where it is (i, i + C/2).
        leaf = regrouped(leaf, (2, config.head_width // 2))
    return as_bytes(leaf)


def _key(name: str) -> bytes:
    raw = name.encode()
    return struct.pack("<Q", len(raw)) + raw


def _value(value: str | int | float) -> bytes:
    """Return a value after the number of its type: text, float32 or uint32."""
    if isinstance(value, str):
        return struct.pack("<I", 8) + _key(value)
    return (
        struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<2I", 4, value)
    )


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT
