"""The gradients of softmax attention, from its result and its log-normaliser."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from funcrl.core.custom_op import operator, per_device
from funcrl.core.numerics import at_least_float32
from funcrl.ops.exact.segments import (
    SCORES,
    Segments,
    as_batch,
    clear,
    common_first,
    exp_or_zero,
    mask_of,
    row_sums,
    spans_of_rows,
    split_segments,
)

Triple = tuple[Tensor, Tensor, Tensor]


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
    length = q.shape[-2]
    grads = attend_gradients_impl(
        as_batch(grad), as_batch(q), as_batch(k), as_batch(v), first.reshape(-1, length),
        last.reshape(-1, length), as_batch(out), normaliser.reshape(-1, *normaliser.shape[-2:]),
        spans_of_rows(shared), window,
    )  # fmt: skip
    grad_q, grad_k, grad_v = (g.view(p.shape) for g, p in zip(grads, (q, k, v), strict=True))
    return grad_q, grad_k, grad_v


@per_device
def attend_gradients_impl(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, out: Tensor,
    normaliser: Tensor, shared: Tensor | None = None, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (grad_q, grad_k, grad_v) of `attend`, whose results are `out` and `normaliser`.

    A row's gradients depend on that row and on its length, which the products sum over; a packed
    segment's on the segment, filled up to a multiple of 8. Those of a shared prefix are summed over
    the segments that see it, in their order.
    """
    start = common_first(first, last) if shared is None else None
    if start is not None:
        seen = last if start == 0 else torch.where(last >= first, last - start, -1)
        keys = slice(start, k.shape[2])
        parts = _in_groups(grad, q, k[:, :, keys], v[:, :, keys], seen, out, normaliser, window)
        if not start:
            return parts
        padding = (0, 0, start, 0)
        return parts[0], nn.functional.pad(parts[1], padding), nn.functional.pad(parts[2], padding)
    wide = at_least_float32(q.dtype)
    grad_q, grad_k, grad_v = (
        torch.zeros(x.shape, dtype=kept, device=x.device)
        for x, kept in ((q, q.dtype), (k, wide), (v, wide))
    )
    for part in split_segments(first, last, shared):
        at_query, at_key = (part.row, slice(None), part.query), (part.row, slice(None), part.key)
        grad_part, q_part, out_part, normaliser_part = (
            x[at_query].transpose(1, 2) for x in (grad, q, out, normaliser)
        )
        k_part, v_part = (x[at_key].transpose(1, 2).to(wide) for x in (k, v))
        inputs = grad_part, q_part, k_part, v_part, part.last, out_part, normaliser_part
        values = _in_groups(*inputs, window)
        row = part.row.expand_as(part.query)[part.real]
        grad_q[row, :, part.query[part.real]] = values[0].transpose(1, 2)[part.real]
        _add_keys((grad_k, grad_v), values[1:], part)
    return grad_q, grad_k.to(k.dtype), grad_v.to(v.dtype)


def _add_keys(wholes: Sequence[Tensor], values: Sequence[Tensor], part: Segments) -> None:
    """Add the gradients of segments' keys to those of rows, one segment after the other."""
    counts = (part.last.amax(dim=1) + 1).tolist()
    for number, (row, count) in enumerate(zip(part.row.flatten().tolist(), counts, strict=True)):
        place = part.key[number, :count]
        for whole, value in zip(wholes, values, strict=True):
            whole[row].index_add_(1, place, value[number, :, :count])


def _in_groups(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, last: Tensor, out: Tensor, normaliser: Tensor,
    window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return the gradients where query t sees the keys 0..last[t], a few rows at a time."""
    grads = [torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    if not q.numel() or not k.numel():
        return grads[0], grads[1], grads[2]
    rows = max(1, SCORES // (q.shape[1] * q.shape[2] * k.shape[2]))
    for start in range(0, q.shape[0], rows):
        part = slice(start, start + rows)
        inputs = [x[part] for x in (grad, q, k, v, last, out, normaliser)]
        values = _gradients(*inputs, window=window)
        if not all(bool(torch.isfinite(value.sum())) for value in values):
            top = last[part].amax(dim=1)
            inputs[2:4] = [clear(x, top) for x in inputs[2:4]]
            values = _gradients(*inputs, window=window)
        for whole, value in zip(grads, values, strict=True):
            whole[part] = value
    return grads[0], grads[1], grads[2]


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, last: Tensor, out: Tensor, normaliser: Tensor,
    *, window: int | None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return the gradients in at least float32."""
    (batch, num_keys, count, width), wide = k.shape, at_least_float32(q.dtype)
    num, rows = batch * num_keys, q.shape[1] // num_keys * q.shape[2]
    scale = width**-0.5
    g, flat, result = (_matrices(x, num, wide) for x in (grad, q, out))
    flat = flat * scale
    k_flat, v_flat = (_matrices(x, num, wide) for x in (k, v))
    p = _products(flat, k_flat.mT)
    real = p.unflatten(0, (batch, -1)).unflatten(2, (-1, q.shape[2]))
    real.add_(mask_of(last, count, wide, window))
    p = exp_or_zero(p.sub_(normaliser.reshape(num, rows, 1)))
    inner = row_sums((g * result).flatten(0, 1)).view(num, rows, 1)
    slope = _products(g, v_flat.mT).sub_(inner).mul_(p)
    grad_q = _products(slope, k_flat).mul_(scale)
    parts = grad_q, _products(slope.mT, flat), _products(p.mT, g)
    found = zip(parts, (q, k, v), strict=True)
    return tuple(part[..., :width].reshape(x.shape) for part, x in found)


def _matrices(x: Tensor, num: int, wide: torch.dtype) -> Tensor:
    """Return [B, H, T, C] as `num` contiguous matrices: other strides have other bits.

    C is filled up to a multiple of 4: where a matrix begins in memory, which may matter, is then an
    aligned address for each.
    """
    filled = nn.functional.pad(x.to(wide), (0, -x.shape[-1] % 4))
    return filled.contiguous().view(num, -1, filled.shape[-1])


def _products(left: Tensor, right: Tensor) -> Tensor:
    """Return the product of each pair of matrices, at least two pairs at once.

    The library multiplies a single pair by another function, with other bits.
    """
    if left.shape[0] > 1:
        return torch.bmm(left, right)
    return torch.bmm(left.expand(2, -1, -1), right.expand(2, -1, -1))[:1]
