"""The gradients of softmax attention, from its result and its log-normaliser."""

import torch
from torch import Tensor, nn

from funcrl.ops.exact.cpu.segments import common_first, split_segments
from funcrl.ops.exact.cpu.sums import row_sums, wide_dtype


def attend_gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, first: Tensor, last: Tensor, out: Tensor,
    normaliser: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Return (grad_q, grad_k, grad_v) of `attend`, whose results are `out` and `normaliser`."""
    start = common_first(first, last)
    if start is not None:
        seen = torch.where(last >= first, last - start, -1)
        keys = slice(start, k.shape[2])
        grads = _gradients(grad, q, k[:, :, keys], v[:, :, keys], seen, out, normaliser)
        if not start:
            return grads
        return grads[0], *(nn.functional.pad(part, (0, 0, start, 0)) for part in grads[1:])
    grads = tuple(torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for part in split_segments(first, last):
        at_query, at_key = (part.row, slice(None), part.query), (part.row, slice(None), part.key)
        values = _gradients(
            *(x[at_query].transpose(1, 2) for x in (grad, q)),
            *(x[at_key].transpose(1, 2) for x in (k, v)),
            part.last,
            *(x[at_query].transpose(1, 2) for x in (out, normaliser)),
        )
        owned = torch.arange(part.key.shape[1], device=q.device) <= part.last.amax(1, keepdim=True)
        for whole, value, place, real in zip(
            grads, values, (part.query, part.key, part.key), (part.real, owned, owned), strict=True
        ):
            row = part.row.expand_as(place)[real]
            whole[row, :, place[real]] = value.transpose(1, 2)[real]
    return grads


def _gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, last: Tensor, out: Tensor, normaliser: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients where query t sees the keys 0..last[t]."""
    batch, num_keys, count, width = k.shape
    wide, scale = wide_dtype(q), q.shape[-1] ** -0.5
    group = q.shape[1] // num_keys
    shape = (batch * num_keys, group * q.shape[2])
    top = last.amax(dim=1) if last.shape[1] else last.new_full((batch,), -1)
    places = torch.arange(count, device=q.device)
    unseen = (places > top[:, None])[:, None, :, None]
    flat = [x.to(wide).reshape(*shape, width) for x in (grad, q, out)]
    keys = [x.to(wide).masked_fill(unseen, 0).reshape(-1, count, width) for x in (k, v)]
    if shape[0] == 1:  # a product of one pair of matrices has other bits than one of several
        flat, keys = ([x.expand(2, -1, -1) for x in parts] for parts in (flat, keys))
    (g, rows, result), (k_flat, v_flat) = flat, keys
    hidden = (places > last[..., None])[:, None, None].expand(-1, num_keys, group, -1, -1)
    p = torch.bmm(rows, k_flat.mT)[: shape[0]].mul_(scale)
    p = p.sub_(normaliser.reshape(*shape, 1)).exp_().masked_fill_(hidden.reshape(p.shape), 0)
    inner = row_sums((g * result).flatten(0, 1)).view(g.shape[0], -1, 1)
    slope = torch.bmm(g, v_flat.mT).sub_(inner)[: shape[0]].mul_(p).mul_(scale)
    if shape[0] == 1:
        p, slope = p.expand(2, -1, -1), slope.expand(2, -1, -1)
    parts = torch.bmm(slope, k_flat), torch.bmm(slope.mT, rows), torch.bmm(p.mT, g)
    grad_q, grad_k, grad_v = (part[: shape[0]] for part in parts)
    return (
        grad_q.reshape(q.shape).to(q.dtype),
        grad_k.reshape(k.shape).to(k.dtype),
        grad_v.reshape(v.shape).to(v.dtype),
    )
