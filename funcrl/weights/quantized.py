"""GGUF's storage types: bytes [n, block_bytes] to numbers [n, block] in float32.

A block of 32 numbers (256 for the K types) shares a scale, and in some types an offset:
`x = scale * q + offset`. Layouts: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md and the
structs of ggml-common.h.

They are decoded by hand because `gguf.quants.dequantize` (0.19) computes the same bits in four to
eighteen times as long, and is not installed with funcrl alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.weights.tensors import plain


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
