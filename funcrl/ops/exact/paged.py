"""Attention of new tokens on a paged KV cache, for generators: no derivative."""

from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.core.custom_op import per_device
from funcrl.ops.exact.attention import attend_from_zero


class Sharing(NamedTuple):
    """The groups of N samples; a group's samples have their first pages in common."""

    members: Tensor  # [groups, most] int32, numbers of samples, -1 for none
    pages: Tensor  # [N] int32, the number of pages that a sample has in common with its group


@per_device
def attend_paged(q: Tensor, cache: Tensor, tables: Tensor, request: Tensor, last: Tensor) -> Tensor:
    """Return [N, H, C]: query n attends to places 0..last[n] of its request.

    Args:
        q: [N, H, C].
        cache: [blocks, K, size, 2C], a place's key beside its value, of any strides.
        tables: [R, W] int64; place p of a request is in block `tables[request, p // size]`.
        request: [N] int64.
        last: [N] int64.
    """
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    if not q.shape[0]:
        return out
    counts = torch.bincount(request, minlength=tables.shape[0])[request]
    single = (counts == 1).nonzero().squeeze(1)
    if single.numel():
        out[single] = _attend(
            q[single, :, None], cache, tables[request[single]], last[single, None]
        )
    # The queries of a chunk of a prompt share the request's keys.
    for chosen in request[counts > 1].unique().tolist():
        at = (request == chosen).nonzero().squeeze(1)
        rows = q[at].transpose(0, 1)[None]
        out[at] = _attend(rows, cache, tables[chosen : chosen + 1], last[None, at])
    return out


@per_device
def attend_new(
    q: Tensor, k: Tensor, v: Tensor, cache: Tensor, tables: Tensor, last: Tensor, sharing: Sharing
) -> Tensor:
    """Return attention [N, H, C] of sample n over its places 0..last[n], the last one from k and v.

    Writes keys and values [N, K, C] into the cache [pages, K, size, 2C]: place p of a sample is in
    page `tables[n, p // size]`. A last place of -1 says that there is no sample: nothing is
    written, and its result is 0.
    """
    rows = sharing.members[sharing.members >= 0].long()
    rows = rows[last[rows] >= 0]
    page = tables[rows, last[rows] // cache.shape[2]].long()
    cache[page, :, last[rows] % cache.shape[2]] = torch.cat([k, v], dim=-1)[rows]
    every = torch.arange(len(q), device=q.device)
    return attend_paged(q, cache, tables[: len(q)].long(), every, last)


def _attend(q: Tensor, cache: Tensor, tables: Tensor, last: Tensor) -> Tensor:
    """Return [B T, H, C] of queries q [B, H, T, C] of requests with tables [B, W]."""
    width, size = q.shape[-1], cache.shape[2]
    blocks = max(int(last.amax()), 0) // size + 1
    # A request's table may hold anything after its own blocks.
    own = torch.arange(blocks, device=q.device) <= last.amax(dim=1, keepdim=True) // size
    both = cache[torch.where(own, tables[:, :blocks], tables[:, :1])]  # [B, blocks, K, size, 2C]
    both = both.transpose(1, 2).flatten(2, 3)
    out, _ = attend_from_zero(q, both[..., :width], both[..., width:], last)
    return out.transpose(1, 2).flatten(0, 1)
