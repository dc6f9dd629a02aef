"""Attention on a paged KV cache by Triton, whose pages the samples of a prompt share.

The bits of decoding are those of `attend_kernel`: the same blocks in the same order, in two
launches. What a row has summed after the shared pages goes from one to the other through memory.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from funcrl.ops.exact.cuda.attention import attend_kernel, folded, log2_scale, row_products, tile_of
from funcrl.ops.exact.cuda.layout import STRICT, aligned_heads, fresh
from funcrl.ops.exact.paged import Sharing


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


def attend_new(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, tables: Tensor, last: Tensor, sharing: Sharing
) -> Tensor:
    """Return attention [N, H, C] of sample n over its places 0..last[n], the last one from k and v.

    Writes keys and values [N, K, C] into the cache [pages, K, size, 2C]: place p of a sample is in
    page `tables[n, p // size]`. Samples of one group read the pages that they share once. A last
    place of -1 says that there is no sample: nothing is written, and its result is 0.
    """
    size, heads, width = q.shape
    q, k, v = (aligned_heads(part) for part in (q, k, v))
    out = fresh(q, size, heads, width)
    if not size:
        return out
    key_heads, group = cache.shape[1], heads // cache.shape[1]
    tile = tile_of(q, group, packed=True)
    options = {name: value for name, value in tile.options.items() if name != "PACK"}
    tops, totals = (fresh(q, size, heads, dtype=torch.float32) for _ in range(2))
    sums = fresh(q, size, heads, width, dtype=torch.float32)
    num_groups, members = sharing.members.shape
    strides = (*cache.stride()[:3], tables.stride(0))
    tiles = -(-members // (tile.rows // tile.pack))
    shared_kernel[(num_groups, key_heads, tiles)](
        q, k, v, cache, tables, last, sharing.members, sharing.pages, tops, totals, sums, width,
        log2_scale(width), *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *strides,
        MEMBERS=members, PACK=tile.pack, SIZE=cache.shape[2], **options, **STRICT,
    )  # fmt: skip
    own_kernel[(size, key_heads)](
        q, cache, tables, last, sharing.pages, tops, totals, sums, out, width,
        log2_scale(width), *q.stride()[:2], *strides, SIZE=cache.shape[2], **options, **STRICT,
    )  # fmt: skip
    return out


@triton.jit
def shared_kernel(
    q, k, v, cache, tables, last, members, shared, tops, totals, sums, C, scale,
    q_n, q_h, k_n, k_h, v_n, v_h, c_page, c_head, c_place, table_n,
    MEMBERS: tl.constexpr, HEADS: tl.constexpr, PACK: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BC: tl.constexpr, SIZE: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Store each sample's new key and value, and sum over the pages that a group shares.

    A tile has BM / PACK samples of one group, and the HEADS <= PACK heads of one key head.
    """
    group, key_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    row, columns = tl.arange(0, BM), tl.arange(0, BC)
    place = tl.program_id(2) * (BM // PACK) + row // PACK
    member = tl.load(members + group * MEMBERS + place, mask=place < MEMBERS, other=-1)
    leader = tl.max(member, 0)
    if leader >= 0:
        inside = (columns < C)[None, :]
        known = (member >= 0) & (row % PACK < HEADS)
        sample = tl.maximum(member, 0).to(tl.int64)

        end = tl.load(last + sample, mask=known, other=-1)
        writes = (row % PACK == 0) & (end >= 0)
        pages_at = tables + sample * table_n + end // SIZE
        last_page = tl.load(pages_at, mask=writes, other=0).to(tl.int64)
        at = last_page * c_page + key_head * c_head + (end % SIZE) * c_place
        seen = writes[:, None] & inside
        key = tl.load(k + (sample * k_n + key_head * k_h)[:, None] + columns, mask=seen, other=0.0)
        tl.store(cache + at[:, None] + columns[None, :], key, mask=seen)
        value = tl.load(
            v + (sample * v_n + key_head * v_h)[:, None] + columns, mask=seen, other=0.0
        )
        tl.store(cache + C + at[:, None] + columns[None, :], value, mask=seen)

        pages = tl.load(shared + leader)
        if pages > 0:
            heads = key_head * HEADS + row % PACK
            q_at = q + sample * q_n + heads * q_h
            seen = known[:, None] & inside
            if not IEEE:
                queries = tl.load(q_at[:, None] + columns[None, :], mask=seen, other=0.0)
            top = tl.full((BM,), -1e30, tl.float32)
            total = tl.zeros((BM,), tl.float32)
            summed = tl.zeros((BM, BC), tl.float32)
            table = tables + leader.to(tl.int64) * table_n
            for start in range(0, pages * SIZE, BN):
                page = tl.load(table + start // SIZE).to(tl.int64)
                places = start % SIZE + tl.arange(0, BN)
                keys_at = cache + page * c_page + key_head * c_head + places * c_place
                if IEEE:
                    score = row_products(q_at, known, keys_at, places >= 0, C, BM, BN)
                else:
                    keys = tl.load(keys_at[:, None] + columns[None, :], mask=inside, other=0.0)
                    score = tl.dot(queries, tl.trans(keys))
                values = tl.load(keys_at[:, None] + C + columns[None, :], mask=inside, other=0.0)
                top, total, summed = folded(score, values, top, total, summed, scale, IEEE)
            at = sample * (tl.num_programs(1) * HEADS) + heads
            tl.store(tops + at, top, mask=known)
            tl.store(totals + at, total, mask=known)
            tl.store(sums + at[:, None] * C + columns[None, :], summed, mask=seen)


@triton.jit
def own_kernel(
    q, cache, tables, last, shared, tops, totals, sums, out, C, scale,
    q_n, q_h, c_page, c_head, c_place, table_n,
    HEADS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BC: tl.constexpr,
    SIZE: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """Write the attention of one sample and key head: what is summed already, and its own pages."""
    sample, key_head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    row, columns = tl.arange(0, BM), tl.arange(0, BC)
    known, inside = row < HEADS, (columns < C)[None, :]
    seen = known[:, None] & inside
    heads = key_head * HEADS + row
    end = tl.load(last + sample)
    begin = tl.load(shared + sample) * SIZE
    q_at = q + sample * q_n + heads * q_h
    if not IEEE:
        queries = tl.load(q_at[:, None] + columns[None, :], mask=seen, other=0.0)
    at = sample * (tl.num_programs(1) * HEADS) + heads
    resumed = tl.where(known, begin, 0) > 0
    top = tl.load(tops + at, mask=resumed, other=-1e30)
    total = tl.load(totals + at, mask=resumed, other=0.0)
    sums_at = sums + at[:, None] * C + columns[None, :]
    summed = tl.load(sums_at, mask=resumed[:, None] & inside, other=0.0)
    table = tables + sample * table_n
    page = tl.load(table + begin // SIZE).to(tl.int64)
    for start in range(begin, end + 1, BN):
        places = start % SIZE + tl.arange(0, BN)
        alive = start + tl.arange(0, BN) <= end
        keys_at = cache + page * c_page + key_head * c_head + places * c_place
        # The next one is asked for early, as the addresses of keys wait for it.
        later = start + BN
        page = tl.load(table + later // SIZE, mask=later <= end, other=0).to(tl.int64)
        if IEEE:
            score = row_products(q_at, known, keys_at, alive, C, BM, BN)
        else:
            keys = tl.load(
                keys_at[:, None] + columns[None, :], mask=alive[:, None] & inside, other=0.0
            )
            score = tl.dot(queries, tl.trans(keys))
        score = tl.where(alive[None, :], score, -float("inf"))
        values = tl.load(
            keys_at[:, None] + C + columns[None, :], mask=alive[:, None] & inside, other=0.0
        )
        top, total, summed = folded(score, values, top, total, summed, scale, IEEE)
    total = tl.where(end < 0, 1.0, total)
    summed = tl.where(end < 0, 0.0, summed)
    result = summed * (1.0 / total)[:, None]
    tl.store(out + at[:, None] * C + columns[None, :], result, mask=seen)
