"""Softmax attention in products of one shape, over blocks of keys in order."""

import torch
from torch import Tensor, nn

from funcrl.ops.exact.cpu.segments import common_first, split_segments
from funcrl.ops.exact.cpu.sums import wide_dtype

_QUERIES = 8  # rows of a tile: queries of the heads that share a key head
_KEYS = 32  # keys of a block


def attend(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [B, H, T, C], normaliser [B, H, T]): query t sees keys first[t]..last[t].

    Args:
        q: [B, H, T, C].
        k: [B, K, S, C], of any strides; keys that no query of a row sees may hold anything.
        v: [B, K, S, C].
        first: [B, T] int64, not decreasing along T.
        last: [B, T] int64; a query whose last is before its first sees nothing, its result is 0.
    """
    start = common_first(first, last)
    if start is not None:
        hidden = torch.where(last >= first, last - start, -1)
        return attend_from_zero(q, k[:, :, start:], v[:, :, start:], hidden)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    normaliser = torch.zeros(q.shape[:-1], dtype=wide_dtype(q), device=q.device)
    for part in split_segments(first, last):
        values = attend_from_zero(
            q[part.row, :, part.query].transpose(1, 2),
            k[part.row, :, part.key].transpose(1, 2),
            v[part.row, :, part.key].transpose(1, 2),
            part.last,
        )
        row = part.row.expand_as(part.query)[part.real]
        for whole, value in zip((out, normaliser), values, strict=True):
            whole[row, :, part.query[part.real]] = value.transpose(1, 2)[part.real]
    return out, normaliser


def attend_from_zero(q: Tensor, k: Tensor, v: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [B, H, T, C], normaliser [B, H, T]): query t sees keys 0..last[t] [B, T]."""
    (batch, num_heads, length, width), num_keys = q.shape, k.shape[1]
    top = last.amax(dim=1) if length else last.new_zeros(batch)
    longest = int(top.amax()) + 1 if batch and length else 0
    if longest <= 0:
        out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
        return out, torch.zeros(q.shape[:-1], dtype=wide_dtype(q), device=q.device)
    blocks = -(-longest // _KEYS)
    shape = (batch, num_keys, num_heads // num_keys, length)
    rows, seen = _tiles(q.unflatten(1, shape[1:3]), last)
    keys, values = _blocks(k, top, blocks), _blocks(v, top, blocks)
    out, normaliser = _softmax(rows, keys, values, seen)
    count = shape[2] * length
    out = out.view(batch, num_keys, -1, width)[:, :, :count]
    normaliser = normaliser.view(batch, num_keys, -1)[:, :, :count]
    return out.reshape(q.shape).to(q.dtype), normaliser.reshape(q.shape[:-1])


def _tiles(q: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    """Return queries [B, K, tiles, rows, C] scaled, and the last key that each sees."""
    batch, num_keys, group, length, width = q.shape
    q = q.to(wide_dtype(q)).mul(width**-0.5).reshape(batch, num_keys, group * length, width)
    seen = last[:, None, None].expand(batch, 1, group, length).reshape(batch, 1, group * length)
    more = -(group * length) % _QUERIES
    q, seen = nn.functional.pad(q, (0, 0, 0, more)), nn.functional.pad(seen, (0, more), value=-1)
    return q.unflatten(2, (-1, _QUERIES)), seen.unflatten(2, (-1, _QUERIES))


def _blocks(x: Tensor, top: Tensor, blocks: int) -> Tensor:
    """Return keys or values [B, K, blocks, keys, C], 0 past the last that any query sees."""
    x = x[:, :, : blocks * _KEYS].to(wide_dtype(x))
    places = torch.arange(x.shape[2], device=x.device)
    x = x.masked_fill((places > top[:, None])[:, None, :, None], 0)
    x = nn.functional.pad(x, (0, 0, 0, blocks * _KEYS - x.shape[2]))
    return x.unflatten(2, (blocks, _KEYS))


def _softmax(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Return (out [B, K, tiles, rows, C], normaliser [B, K, tiles, rows])."""
    places = torch.arange(_KEYS, device=q.device)
    scores = []
    for block in range(k.shape[2]):
        part = _product(q, k[:, :, block].mT)
        hidden = places + block * _KEYS > seen[..., None]
        scores.append(part.masked_fill_(hidden, -torch.inf))
    largest = torch.stack([part.amax(dim=-1, keepdim=True) for part in scores]).amax(dim=0)
    # A query that sees nothing has weights of 0, and not of exp(-inf + inf).
    largest = largest.masked_fill(largest == -torch.inf, 0)
    total = out = None
    for block, part in enumerate(scores):
        weights = torch.exp(part.sub_(largest))
        sums, product = weights.sum(dim=-1, keepdim=True), _product(weights, v[:, :, block])
        total = sums if total is None else total.add_(sums)
        out = product if out is None else out.add_(product)
    assert total is not None
    assert out is not None
    nothing = total == 0
    normaliser = (largest + total.log()).masked_fill_(nothing, 0)
    return out.div_(total.masked_fill(nothing, 1)), normaliser.squeeze(-1)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return left [B, K, tiles, rows, X] times right [B, K, X, Y], at least two at once."""
    shape = left.shape[:-1]
    right = right[:, :, None].expand(*left.shape[:3], *right.shape[-2:]).flatten(0, 2)
    left = left.flatten(0, 2)
    if left.shape[0] == 1:
        left, right = left.expand(2, -1, -1), right.expand(2, -1, -1)
    return torch.bmm(left, right)[: shape[:3].numel()].view(*shape, right.shape[-1])
