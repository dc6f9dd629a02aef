"""Attention by one Triton kernel: for training, prefill, decoding and a paged cache."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.attention_kernels import attend_kernel
from funcrl.ops.exact.cuda.layout import STRICT, aligned_heads, fresh, power_of_two

_FEW = 8  # queries up to which the heads of a group share a tile


class Tile(NamedTuple):
    """The constants of a launch; a row's bits are the same for each tile of one dtype and width."""

    rows: int
    heads: int  # of a tile
    pack: int  # places for heads in a tile, a power of two
    options: dict[str, int | bool]


def attend(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, shared: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return softmax attention over the keys first..last [B, H, T, C], and normalisers [B, H, T].

    normaliser = log(sum_s exp(q k_s / sqrt(C)))

    The keys of a prefix, `shared` [B, T, 2] from its first one and of its number, are seen before.
    With a window, only the last ones of all these are.
    """
    batch, heads, length, width = q.shape
    q, k, v = (aligned_heads(part) for part in (q, k, v))
    out = fresh(q, batch, heads, length, width)
    normaliser = fresh(q, batch, heads, length, dtype=torch.float32)
    if not out.numel():
        return out, normaliser
    group = heads // k.shape[1]
    tile = tile_of(q, group, packed=length <= _FEW)
    spans, span_strides = prefix_arguments(shared, first)
    attend_kernel[(-(-length // (tile.rows // tile.pack)), heads // tile.heads, batch)](
        q, k, v, out, normaliser, first, last, spans, group, length, width, log2_scale(width),
        *q.stride()[:3], *normaliser.stride(), *k.stride()[:3], *v.stride()[:3],
        *first.stride(), *last.stride(), *span_strides,
        SIZE=0, PREFIX=shared is not None, WINDOW=window or 0, **tile.options, **STRICT,
    )  # fmt: skip
    return out, normaliser


def attend_paged(q: Tensor, cache: Tensor, tables: Tensor, request: Tensor, last: Tensor) -> Tensor:
    """Return attention [N, H, C] of query n over the places 0..last[n] of request[n].

    Place p lies in block tables[request, p // size] of the cache [blocks, K, size, 2C].
    """
    size, heads, width = q.shape
    q = aligned_heads(q)
    k, v = (aligned_heads(part) for part in cache.split(width, dim=-1))
    out, normaliser = fresh(q, size, heads, width), fresh(q, size, heads, dtype=torch.float32)
    if not out.numel():
        return out
    group = heads // cache.shape[1]
    # Where each request may have one query, as in decoding, a tile has one; else it has many, as
    # neighbours mostly share a request.
    alone = size <= tables.shape[0]
    batch, length = (size, 1) if alone else (1, size)
    rows, ends = (
        [part.unsqueeze(1) if alone else part.unsqueeze(0) for part in pair]
        for pair in ((q, normaliser), (request, last))
    )
    strides = [part.transpose(1, 2).stride()[:3] for part in rows]  # of [B, H, T]
    tile = tile_of(q, group, packed=True)
    attend_kernel[(-(-length // (tile.rows // tile.pack)), heads // tile.heads, batch)](
        q, k, v, out, normaliser, request, last, tables, group, length, width, log2_scale(width),
        *strides[0], *strides[1], *k.stride()[:3], *v.stride()[:3],
        *ends[0].stride(), *ends[1].stride(), *tables.stride(),
        SIZE=k.shape[2], PREFIX=False, WINDOW=0, **tile.options, **STRICT,
    )  # fmt: skip
    return out


def prefix_arguments(shared: Tensor | None, other: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Return the spans of prefixes [B, T, 2] and their strides; without any, some other tensor."""
    if shared is None:
        return other, (0, 0)
    shared = shared.contiguous()
    return shared, (shared.stride(0), shared.stride(1))


def log2_scale(width: int) -> float:
    """Return the factor of a score whose powers of 2 are exp(score / sqrt(C))."""
    return math.log2(math.e) / math.sqrt(width)


def tile_of(q: Tensor, group: int, packed: bool) -> Tile:
    """Return the tile for queries like q, whose group of heads reads one key head."""
    columns = max(16, power_of_two(q.shape[-1]))
    ieee = q.dtype == torch.float32
    # On Hopper tiles of 64 and of 128 rows have equal bits; smaller ones are of other instructions.
    rows, keys, warps = (32, 16, 8) if ieee else (64, 64, 4)
    packed = packed and group <= rows
    heads, pack = (group, power_of_two(group)) if packed else (1, 1)
    stages = 1 if ieee else 3 if columns <= 128 else 2
    options = {
        "PACK": pack, "HEADS": heads, "BM": rows, "BN": keys, "BC": columns, "IEEE": ieee,
        "num_warps": warps, "num_stages": stages,
    }  # fmt: skip
    return Tile(rows, heads, pack, options)
