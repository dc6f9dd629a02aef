"""Attention whose rows stand alone: query t sees the keys from first[t] to last[t].

Keys are taken in blocks that are counted from first[t], so that a sample has the same bits in a row
of its own, in a packed row, in a piece of a prompt, and token by token on a cache.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.ops.contract import AttendFn
from funcrl.ops.exact.kernels import kernels_of
from funcrl.ops.exact.recipe import differentiable, operator

Triple = tuple[Tensor, Tensor, Tensor]


def _attended(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> Sequence[Tensor]:
    """Return attention [..., H, T, C] and its log-normalisers [..., H, T]."""
    spans = (part.expand(*q.shape[:-3], q.shape[-2]).reshape(-1, q.shape[-2])
             for part in (first, last))  # fmt: skip
    out, normaliser = kernels_of(q).attend(*(_batch(part) for part in (q, k, v)), *spans)
    return out.view(q.shape), normaliser.view(q.shape[:-1])


def _like(q: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    normaliser = q.new_empty(q.shape[:-1], dtype=numerics.at_least_float32(q.dtype))
    return torch.empty_like(q, memory_format=torch.contiguous_format), normaliser


def _count(q: Sequence[int], k: Sequence[int], *_: Any) -> int:
    """Return the operations of both products, with all keys."""
    return 4 * math.prod(q) * k[-2]


@operator("attend", _like, rows=range(5), flops=_count)
def attend_op(
    q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor
) -> tuple[Tensor, Tensor]:
    """Return attention and its log-normalisers."""
    out, normaliser = _attended(q, k, v, first, last)
    return out, normaliser


def _like_gradients(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> Triple:
    contiguous = torch.contiguous_format
    grads = [torch.empty_like(part, memory_format=contiguous) for part in (q, k, v)]
    return grads[0], grads[1], grads[2]


def _count_gradients(_grad: Sequence[int], q: Sequence[int], k: Sequence[int], *_: Any) -> int:
    return 10 * math.prod(q) * k[-2]


@operator("attend_gradients", _like_gradients, rows=range(8), flops=_count_gradients)
def attend_gradients_op(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, out: Tensor,
    normaliser: Tensor,
) -> Triple:  # fmt: skip
    """Return the gradients of queries, keys and values."""
    flat = [_batch(part) for part in (grad, q, k, v)]
    spans = [part.reshape(-1, q.shape[-2]) for part in (first, last)]
    normaliser = normaliser.reshape(-1, *normaliser.shape[-2:])
    grads = kernels_of(q).attend_gradients(*flat, *spans, _batch(out), normaliser)
    grad_q, grad_k, grad_v = (g.view(p.shape) for g, p in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v


def _forward(q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor) -> tuple[Tensor, Tensor]:
    return attend_op(q, k, v, first, last)


def _backward(
    wanted: Sequence[bool], grads: Sequence[Tensor], inputs: Sequence[Any], results: Sequence[Any]
) -> list[Tensor]:
    found = attend_gradients_op(grads[0], *inputs, *results)
    return [each for each, want in zip(found, wanted, strict=False) if want]


_attend = differentiable("attend", _forward, _backward, rows=range(5))


def attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return attention in which a token sees itself and all tokens before it."""
    out: Tensor = _attend(q, k, v, *_causal(q))
    return out


def plain_attend_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return `attend_causal`, without a derivative."""
    return _attended(q, k, v, *_causal(q))[0]


def attend_segments(segment_ids: Tensor) -> AttendFn:
    """Return causal attention within segments [..., T]; padding, -1, is a segment, too."""
    changes = segment_ids[..., 1:] != segment_ids[..., :-1]
    starts = torch.cat([torch.ones_like(segment_ids[..., :1], dtype=torch.bool), changes], dim=-1)
    places = torch.arange(segment_ids.shape[-1], device=segment_ids.device)
    first = torch.where(starts, places, 0).cummax(dim=-1).values
    last = places.expand_as(first)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        spans = (part.expand(*q.shape[:-3], q.shape[-2]) for part in (first, last))
        out: Tensor = _attend(q, k, v, *spans)
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
    return lambda q, k, v: _attended(q, k, v, first, last)[0]


def _causal(q: Tensor) -> tuple[Tensor, Tensor]:
    last = torch.arange(q.shape[-2], device=q.device).expand(*q.shape[:-3], q.shape[-2])
    return torch.zeros_like(last), last


def _batch(x: Tensor) -> Tensor:
    """Return [..., H, T, C] as [B, H, T, C]."""
    return x.reshape(-1, *x.shape[-3:])
