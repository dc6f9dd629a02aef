"""Attention by one Triton kernel: for training, prefill, decoding and a paged cache.

A tile of queries meets blocks of 64 keys, counted from `first`. Each operation on a row is written
out (`fma`), so that no variant of the kernel rounds otherwise.
"""

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.layout import STRICT, aligned_heads, fresh, power_of_two

_FEW = 8  # queries up to which the heads of a group share a tile


class Tile(NamedTuple):
    """The constants of a launch; a row's bits are the same for each tile of one dtype and width."""

    rows: int
    heads: int  # of a tile
    pack: int  # places for heads in a tile, a power of two
    options: dict[str, int | bool]


def attend_impl(
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


NEVER = tl.constexpr(2147483647)


@triton.jit
def row_products(left, left_known, right, right_known, C, M: tl.constexpr, N: tl.constexpr):
    """Return the products [M, N] of float32 rows at pointers, 16 columns at a time, in order.

    Without tensor cores a thread holds its operands in registers, which whole rows would exceed.
    """
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, C, 16):
        columns = start + tl.arange(0, 16)
        inside = (columns < C)[None, :]
        a = tl.load(left[:, None] + columns[None, :], mask=left_known[:, None] & inside, other=0.0)
        b = tl.load(
            right[:, None] + columns[None, :], mask=right_known[:, None] & inside, other=0.0
        )
        total = tl.dot(a, tl.trans(b), total, input_precision="ieee")
    return total


@triton.jit
def folded(score, values, top, total, summed, scale, IEEE: tl.constexpr):
    """Return the maximum, the sum of weights and the weighted values with one more block of keys.

    A score of a key that is not seen is -inf.
    """
    new_top = tl.maximum(top, tl.max(score, 1))
    p = tl.exp2(tl.fma(score, scale, -(new_top * scale)[:, None]))
    shrink = tl.exp2((top - new_top) * scale)
    total = tl.fma(total, shrink, tl.sum(p, 1))
    summed = summed * shrink[:, None]
    if IEEE:
        summed = tl.dot(p, values, summed, input_precision="ieee")
    else:
        summed = tl.dot(p.to(values.dtype), values, summed)
    return new_top, total, summed


@triton.jit
def prefix_span(span, first):
    """Return the number of the first key, and what to add to a prefix's numbers for their places.

    Keys are numbered as if those of the prefix lay just before the segment's own, from `first` on.
    """
    start, count = tl.load(span).to(tl.int32), tl.load(span + 1).to(tl.int32)
    begin = first - count
    return begin, start - begin


@triton.jit
def attend_kernel(
    q, k, v, out, normaliser, group, last, tables, G, T, C, scale,
    q_b, q_h, q_t, o_b, o_h, o_t, k_b, k_h, k_s, v_b, v_h, v_s,
    group_b, group_t, last_b, last_t, table_r, table_w,
    PACK: tl.constexpr, HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    SIZE: tl.constexpr, PREFIX: tl.constexpr, WINDOW: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Write the attention of a tile: BM / PACK queries, each by HEADS <= PACK heads.

    Queries of one `group` read the same keys: where SIZE is 0 it is their first key, else their
    request, whose keys begin at place 0 and lie in blocks of SIZE places. With PREFIX, where SIZE
    is 0, `tables` has the first place and the number of the keys that they read before. With a
    WINDOW each reads the last so many keys alone.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows of a causal batch first
    batch = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1) * HEADS
    key_head = (head // G).to(tl.int64)
    row = tl.arange(0, BM)
    times = tile * (BM // PACK) + row // PACK
    heads = (head + row % PACK).to(tl.int64)
    known = (times < T) & (row % PACK < HEADS)
    columns = tl.arange(0, BC)
    owner = tl.load(group + batch * group_b + times * group_t, mask=known, other=0).to(tl.int32)
    end = tl.load(last + batch * last_b + times * last_t, mask=known, other=-1).to(tl.int32)
    alive = known & (end >= (owner if SIZE == 0 else 0))
    q_at = q + batch * q_b + (heads * q_h + times * q_t)
    if not IEEE:
        inside = known[:, None] & (columns < C)[None, :]
        queries = tl.load(q_at[:, None] + columns[None, :], mask=inside, other=0.0)
    k += key_head * k_h
    v += key_head * v_h
    if SIZE == 0:
        k += batch * k_b
        v += batch * v_b

    top = tl.full((BM,), -1e30, tl.float32)  # finite: a row that sees nothing of a block keeps it
    total = tl.zeros((BM,), tl.float32)
    summed = tl.zeros((BM, BC), tl.float32)
    # Where the queries of a tile are of one group, its ends say so, and no reduction is waited for.
    head_time = tile * (BM // PACK)
    tail_time = tl.minimum(head_time + BM // PACK, T) - 1
    head_group = tl.load(group + batch * group_b + head_time * group_t).to(tl.int32)
    tail_group = tl.load(group + batch * group_b + tail_time * group_t).to(tl.int32)
    head_end = tl.load(last + batch * last_b + head_time * last_t).to(tl.int32)
    tail_end = tl.load(last + batch * last_b + tail_time * last_t).to(tl.int32)
    lowest = head_group if SIZE == 0 else 0
    simple = (head_group == tail_group) & (head_end >= lowest) & (tail_end >= head_end)
    if SIZE > 0:  # requests stand in any order
        simple = simple & (head_time == tail_time)
    current = head_group
    if not simple:
        current = tl.min(tl.where(alive, owner, NEVER), 0)
    while current < NEVER:
        own = alive & (owner == current)
        begin = current if SIZE == 0 else 0
        if PREFIX:
            one = head_time  # a query of the group
            if not simple:
                one = tl.min(tl.where(own, times, NEVER), 0)
            begin, shift = prefix_span(tables + batch * table_r + one * table_w, current)
        stop = tail_end + 1
        if not simple:
            stop = tl.max(tl.where(own, end, -1), 0) + 1
        limit = tl.where(own, end, -1)
        if SIZE > 0:
            page = tables + current.to(tl.int64) * table_r
            places = tl.arange(0, BN)
            block = tl.load(page + places // SIZE * table_w, mask=places < stop, other=0)
        if WINDOW > 0:  # blocks that no query of the tile sees are left out, and change no bit
            least = tl.min(tl.where(own, end, NEVER), 0) - WINDOW + 1
            begin += tl.maximum(least - begin, 0) // BN * BN
        for start in range(begin, stop, BN):
            places = start + tl.arange(0, BN)
            if PREFIX:
                real = tl.where(places < current, places + shift, places)
                k_at, v_at = real * k_s, real * v_s
            elif SIZE == 0:
                k_at, v_at = places * k_s, places * v_s
            else:
                k_at = block * k_b + places % SIZE * k_s
                v_at = block * v_b + places % SIZE * v_s
                # The next ones are asked for early, as the addresses of keys wait for them.
                later = places + BN
                block = tl.load(page + later // SIZE * table_w, mask=later < stop, other=0)
            seen = (columns < C)[None, :] & (places < stop)[:, None]
            if IEEE:
                score = row_products(q_at, known, k + k_at, places < stop, C, BM, BN)
            else:
                keys = tl.load(k + k_at[:, None] + columns[None, :], mask=seen, other=0.0)
                score = tl.dot(queries, tl.trans(keys))
            score = tl.where(places[None, :] <= limit[:, None], score, -float("inf"))
            if WINDOW > 0:
                score = tl.where(places[None, :] > limit[:, None] - WINDOW, score, -float("inf"))
            values = tl.load(v + v_at[:, None] + columns[None, :], mask=seen, other=0.0)
            top, total, summed = folded(score, values, top, total, summed, scale, IEEE)
        following = tl.full((), NEVER, tl.int32)
        if not simple:
            following = tl.min(tl.where(alive & (owner > current), owner, NEVER), 0)
        current = following

    total = tl.where(alive, total, 1.0)
    result = tl.where(alive[:, None], summed * (1.0 / total)[:, None], 0.0)
    at = batch * o_b + heads * o_h + times * o_t
    seen = known[:, None] & (columns < C)[None, :]
    tl.store(out + at[:, None] * C + columns[None, :], result, mask=seen)
    log_total = (top * scale + tl.log2(total)) * 0.6931471805599453
    tl.store(normaliser + at, tl.where(alive, log_total, 0.0), mask=known)
