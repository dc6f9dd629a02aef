"""Attention of one new token of each sample, on pages that the samples of a prompt share."""

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.attention import log2_scale, tile_of
from funcrl.ops.exact.cuda.decode_kernels import own_kernel, shared_kernel
from funcrl.ops.exact.cuda.layout import STRICT, aligned_heads, fresh
from funcrl.ops.exact.sharing import Sharing


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
