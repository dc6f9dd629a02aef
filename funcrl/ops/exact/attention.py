"""Attention whose rows stand alone: query t sees the keys from first[t] to last[t].

Keys are taken in blocks that are counted from first[t], so that a sample has the same bits in a row
of its own, in a packed row, in a piece of a prompt, and token by token on a cache. Before them it
may see the keys of a prefix that several samples share, a span (start, count) of the same row; then
blocks are counted from the prefix's first key, as where prompt and completion are one sample.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.types import Absent
from funcrl.ops.contract import AttendFn
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import differentiable, operator
from funcrl.ops.segments import first_places, spans_of_prefixes

Triple = tuple[Tensor, Tensor, Tensor]


def _attended(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, shared: Tensor | None,
    window: int | None,
) -> Sequence[Tensor]:  # fmt: skip
    """Return attention [..., H, T, C] and its log-normalisers [..., H, T]."""
    spans = (part.expand(*q.shape[:-3], q.shape[-2]).reshape(-1, q.shape[-2])
             for part in (first, last))  # fmt: skip
    flat = (_batch(part) for part in (q, k, v))
    out, normaliser = kernels_of(q).attend(*flat, *spans, _spans_of_rows(shared), window)
    return out.view(q.shape), normaliser.view(q.shape[:-1])


def _like(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    normaliser = q.new_empty(q.shape[:-1], dtype=numerics.at_least_float32(q.dtype))
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


def _like_gradients(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Triple:
    contiguous = torch.contiguous_format
    grads = [torch.empty_like(part, memory_format=contiguous) for part in (q, k, v)]
    return grads[0], grads[1], grads[2]


def _count_gradients(_grad: Sequence[int], q: Sequence[int], k: Sequence[int], *_: Any) -> int:
    return 10 * math.prod(q) * k[-2]


@operator("attend_gradients", _like_gradients, rows=range(9), flops=_count_gradients)
def attend_gradients_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor,
    shared: Tensor | None, out: Tensor, normaliser: Tensor, window: int | None,
) -> Triple:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    flat = [_batch(part) for part in (grad, q, k, v)]
    spans = [part.reshape(-1, q.shape[-2]) for part in (first, last)]
    normaliser = normaliser.reshape(-1, *normaliser.shape[-2:])
    grads = kernels_of(q).attend_gradients(
        *flat, *spans, _batch(out), normaliser, _spans_of_rows(shared), window
    )
    grad_q, grad_k, grad_v = (g.view(p.shape) for g, p in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v


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


def plain_attend_causal(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
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


def _spans_of_rows(shared: Tensor | None) -> Tensor | None:
    """Return [..., T, 2] as [B, T, 2]."""
    return None if shared is None else shared.reshape(-1, *shared.shape[-2:])


def _batch(x: Tensor) -> Tensor:
    """Return [..., H, T, C] as [B, H, T, C]."""
    return x.reshape(-1, *x.shape[-3:])
