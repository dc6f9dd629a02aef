"""Batch-invariant attention: query t sees the keys from first[t] to last[t].

Keys are taken in blocks that are counted from first[t], so that a sample has the same bits in a row
of its own, in a packed row, in a piece of a prompt, and token by token on a cache. Before them it
may see the keys of a prefix that several samples share, a span (start, count) of the same row; then
blocks are counted from the prefix's first key, as where prompt and completion are one sample.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.core.custom_op import differentiable, operator, per_device
from funcrl.core.numerics import at_least_float32
from funcrl.core.types import Absent
from funcrl.ops.attention import first_places, spans_of_prefixes
from funcrl.ops.contract import AttendFn
from funcrl.ops.exact.agreement import batched_product
from funcrl.ops.exact.attention_gradients import attend_gradients_op
from funcrl.ops.exact.segments import (
    SCORES,
    as_batch,
    clear,
    common_first,
    exp_or_zero,
    key_sums,
    mask_of,
    spans_of_rows,
    split_segments,
)


def _attended(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, shared: Tensor | None,
    window: int | None,
) -> Sequence[Tensor]:  # fmt: skip
    """Return attention [..., H, T, C] and its log-normalisers [..., H, T]."""
    first, last = (
        part.expand(*q.shape[:-3], q.shape[-2]).reshape(-1, q.shape[-2]) for part in (first, last)
    )
    out, normaliser = attend_impl(
        as_batch(q), as_batch(k), as_batch(v), first, last, spans_of_rows(shared), window
    )
    return out.view(q.shape), normaliser.view(q.shape[:-1])


def _like(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    normaliser = q.new_empty(q.shape[:-1], dtype=at_least_float32(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), normaliser


def _count(q: Sequence[int], k: Sequence[int], *_: Any) -> int:
    """Return the operations of both products, with all keys."""
    return 4 * math.prod(q) * k[-2]


@operator("attend", _like, rows=range(6), flops=_count)
def attend_op(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, shared: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return attention and its log-normalisers."""
    out, normaliser = _attended(q, k, v, first, last, shared, window)
    return out, normaliser


def _forward(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, shared: Tensor | None,
    window: int | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return attend_op(q, k, v, first, last, shared, window)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    *tensors, window = inputs
    found = attend_gradients_op(grads[0], *tensors, *results, window)
    return [each for each, want in zip(found, wanted, strict=False) if want]


_attend = differentiable("attend", _forward, _backward, rows=range(6))


def attend_causal(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Return attention in which a token sees itself and all tokens before it, or the last ones."""
    out: Tensor = _attend(q, k, v, *_causal(q), None, window)
    return out


def attend_causal_forward(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Return `attend_causal`, without a derivative."""
    return _attended(q, k, v, *_causal(q), None, window)[0]


def attend_segments(segment_ids: Tensor, prefix_ids: Tensor | Absent = ()) -> AttendFn:
    """Return causal attention within segments [..., T]; padding, -1, is a segment, too.

    Args:
        segment_ids: of which all tokens of one number are neighbours.
        prefix_ids: the segment that a token sees besides, -1 for none.
    """
    first = first_places(segment_ids)
    last = torch.arange(segment_ids.shape[-1], device=segment_ids.device).expand_as(first)
    shared = None
    if not isinstance(prefix_ids, tuple):
        shared = spans_of_prefixes(segment_ids, prefix_ids, first)

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        lead = q.shape[:-3]
        spans = (part.expand(*lead, q.shape[-2]) for part in (first, last))
        prefixes = None if shared is None else shared.expand(*lead, *shared.shape[-2:])
        out: Tensor = _attend(q, k, v, *spans, prefixes, window)
        return out

    return attend


def attend_last(positions: Tensor, _layer: Tensor, _places: int) -> AttendFn:
    """Return attention of one token a sample on a cache, without a derivative.

    Args:
        positions: [n], where each token stands in its sample.
        _layer: a layer of the cache; of no use here.
        _places: the number of places in use; of no use here.
    """
    last = positions[:, None]
    first = torch.zeros_like(last)

    def attend(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
        return _attended(q, k, v, first, last, None, window)[0]

    return attend


def _causal(q: Tensor) -> tuple[Tensor, Tensor]:
    last = torch.arange(q.shape[-2], device=q.device).expand(*q.shape[:-3], q.shape[-2])
    return torch.zeros_like(last), last


# The keys that one product sums over; a longer row's sums are added up in order.
_KEYS = 256


@per_device
def attend_impl(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, shared: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return (out [B, H, T, C], normaliser [B, H, T]): query t sees keys first[t]..last[t].

    Args:
        q: [B, H, T, C].
        k: [B, K, S, C], of any strides; keys that no query of a row sees may hold anything.
        v: [B, K, S, C].
        first: [B, T] int64, not decreasing along T.
        last: [B, T] int64; a query whose last is before its first sees nothing, its result is 0.
        shared: [B, T, 2] int64, the first one and the number of keys that are seen before those,
            equal for queries of the same first; none when left out.
        window: how many keys a query sees, the last ones of these; all when left out.
    """
    start = common_first(first, last) if shared is None else None
    if start is not None:
        seen = last if start == 0 else torch.where(last >= first, last - start, -1)
        return attend_from_zero(q, k[:, :, start:], v[:, :, start:], seen, window)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    normaliser = torch.zeros(q.shape[:-1], dtype=at_least_float32(q.dtype), device=q.device)
    for part in split_segments(first, last, shared):
        values = attend_from_zero(
            q[part.row, :, part.query].transpose(1, 2),
            k[part.row, :, part.key].transpose(1, 2),
            v[part.row, :, part.key].transpose(1, 2),
            part.last,
            window,
        )
        row = part.row.expand_as(part.query)[part.real]
        for whole, value in zip((out, normaliser), values, strict=True):
            whole[row, :, part.query[part.real]] = value.transpose(1, 2)[part.real]
    return out, normaliser


def attend_from_zero(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor, window: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return (out [B, H, T, C], normaliser [B, H, T]): query t sees keys 0..last[t] [B, T].

    Rows and queries are computed in groups whose scores fit into the processor's cache.
    """
    batch, num_heads, length, _ = q.shape
    longest = int(last.amax()) + 1 if last.numel() else 0
    queries = max(1, min(length, max(16, SCORES // (num_heads * max(longest, 1)))))
    rows = max(1, SCORES // (num_heads * queries * max(longest, 1)))
    if longest > 0 and queries == length and rows >= batch:
        return _attend_group(q, k, v, last, longest, window)
    out = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    normaliser = torch.zeros(q.shape[:-1], dtype=at_least_float32(q.dtype), device=q.device)
    if longest <= 0:
        return out, normaliser
    for row in range(0, batch, rows):
        at_row = slice(row, row + rows)
        for query in range(0, length, queries):
            at_query = slice(query, query + queries)
            seen = last[at_row, at_query]
            count = int(seen.amax()) + 1
            if count > 0:
                inputs = q[at_row, :, at_query], k[at_row], v[at_row], seen
                parts = _attend_group(*inputs, count, window)
                out[at_row, :, at_query], normaliser[at_row, :, at_query] = parts
    return out, normaliser


def _attend_group(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor, count: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return (out, normaliser) where no query sees more than `count` keys.

    Keys that a query does not see have a weight of 0. Only where that is not enough, because they
    are no numbers, they are replaced.
    """
    wide = at_least_float32(q.dtype)
    keys, values = _widened(k, count, wide), _widened(v, count, wide)
    out, normaliser = _softmax(q, keys, values, last, window)
    # A sum of many numbers is the fastest test of all of them.
    if not bool(torch.isfinite(out.sum() + normaliser.sum())):
        top = last.amax(dim=1)
        keys, values = (_widened(clear(x[:, :, :count], top), count, wide) for x in (k, v))
        out, normaliser = _softmax(q, keys, values, last, window)
    return out.to(q.dtype), normaliser.contiguous()


def _widened(x: Tensor, count: int, wide: torch.dtype) -> Tensor:
    """Return the first `count` keys or values, and more to a multiple of 16, as [B K, S, C]."""
    padded = -(-count // 16) * 16
    if x.shape[2] >= padded:
        x = x[:, :, :padded].to(wide)
        flat = x.flatten(0, 1)
        return flat if flat.stride(-1) == 1 else flat.contiguous()
    whole = torch.zeros(*x.shape[:2], padded, x.shape[3], dtype=wide, device=x.device)
    whole[:, :, :count] = x[:, :, :count]
    return whole.flatten(0, 1)


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, last: Tensor, window: int | None
) -> tuple[Tensor, Tensor]:
    """Return (out [B, H, T, C], normaliser [B, H, T]) in at least float32."""
    (batch, _, length, width), (num, num_places) = q.shape, k.shape[:2]
    rows = q.shape[:3].numel() // num
    flat = q.to(k.dtype).contiguous().mul(width**-0.5).view(num, rows, width)
    # The library's order of sums is another one for few rows.
    few = 16 - rows if width > 128 else -rows % 8
    if few > 0:
        flat = nn.functional.pad(flat, (0, 0, 0, few))
    scores = batched_product(flat, k.mT, width)
    real = scores.unflatten(0, (batch, -1))[:, :, :rows].unflatten(2, (-1, length))
    real.add_(mask_of(last, num_places, scores.dtype, window))
    # A query that sees nothing has a largest score of -inf; its weights are 0.
    largest = scores.amax(dim=-1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).min)
    weights = exp_or_zero(scores.sub_(largest))
    total, out = key_sums(weights), batched_product(weights[..., :_KEYS], v[:, :_KEYS], _KEYS)
    for start in range(_KEYS, num_places, _KEYS):
        part = slice(start, start + _KEYS)
        out.add_(batched_product(weights[..., part], v[:, part], _KEYS))
    normaliser = largest.add_(total.log())
    if int(last.amin()) < 0:
        nothing = total == 0
        total, normaliser = total.masked_fill(nothing, 1), normaliser.masked_fill(nothing, 0)
    out = out.div_(total)
    return out[:, :rows].reshape(q.shape), normaliser[:, :rows].reshape(q.shape[:-1])
