"""The backward pass of attention by Triton, without atomic additions: equal bits at each run."""

import torch
from torch import Tensor

from funcrl.ops.exact.cuda.attention import log2_scale, prefix_arguments
from funcrl.ops.exact.cuda.attention_gradient_kernels import key_kernel, query_kernel
from funcrl.ops.exact.cuda.attention_range_kernels import range_kernel
from funcrl.ops.exact.cuda.layout import STRICT, aligned_heads, fresh, power_of_two

_SCAN = 512  # queries of which a program reads the ranges at a time


def attend_gradients(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    first: Tensor,
    last: Tensor,
    out: Tensor,
    normaliser: Tensor,
    shared: Tensor | None = None,
    window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q [B, H, T, C], k and v [B, K, S, C].

    p = exp(score - normaliser),  d score = p (grad v^T - sum(grad * out))

    Those of the keys of a prefix, which `shared` says as in `attend`, are summed over the segments
    that see it, in their order.
    """
    batch, heads, length, width = q.shape
    key_heads, places = k.shape[1:3]
    grad, q, k, v, out = (aligned_heads(part) for part in (grad, q, k, v, out))
    grads = fresh(q, *q.shape), fresh(k, *k.shape), fresh(v, *v.shape)
    if not grads[0].numel():
        return grads[0], grads[1].zero_(), grads[2].zero_()
    if not places:
        return grads[0].zero_(), grads[1], grads[2]
    columns = max(16, power_of_two(width))
    delta, power = (fresh(q, batch, heads, length, dtype=torch.float32) for _ in range(2))
    inputs = grad, q, k, v, delta, power, first, last
    strides = [stride for part in (grad, q, k, v) for stride in part.stride()[:3]]
    strides += [*first.stride(), *last.stride()]
    factors = log2_scale(width), width**-0.5
    spans, span_strides = prefix_arguments(shared, first)
    prefix = shared is not None
    tile = _query_tile(q.dtype, columns)
    query_kernel[(-(-length // tile["BM"]), heads, batch)](
        *inputs, out, normaliser, grads[0], heads, heads // key_heads, length, width, *factors,
        *strides, *out.stride()[:3], *normaliser.stride(), spans, *span_strides,
        BC=columns, PREFIX=prefix, WINDOW=window or 0, **tile, **STRICT,
    )  # fmt: skip
    tile = _key_tile(q.dtype, columns)
    tiles = -(-places // tile["BN"])
    ranges = fresh(q, batch, tiles, 5, dtype=torch.int32)
    lengths = fresh(q, batch * tiles, dtype=torch.int32)
    range_kernel[(tiles, batch)](
        first, last, spans, ranges, lengths, length, *strides[-4:], *span_strides,
        BN=tile["BN"], BT=_SCAN, PREFIX=prefix, **STRICT,
    )  # fmt: skip
    # A prefix is seen by all its samples: the programs of its keys run longest, and start first.
    # Others keep their order, as neighbours read the same queries.
    order = lengths.argsort(descending=True, stable=True) if prefix else lengths
    key_kernel[(batch * tiles * key_heads,)](
        *inputs, ranges, order, *grads[1:], heads, heads // key_heads, length, places, width, tiles,
        *factors, *strides, spans, *span_strides, BC=columns, BT=_SCAN, PREFIX=prefix,
        WINDOW=window or 0, **tile, **STRICT,
    )  # fmt: skip
    return grads


def _query_tile(dtype: torch.dtype, columns: int) -> dict[str, int | bool]:
    if dtype == torch.float32:
        return {"BM": 32, "BN": 16, "IEEE": True, "num_warps": 8, "num_stages": 1}
    if columns > 128:
        return {"BM": 64, "BN": 64, "IEEE": False, "num_warps": 4, "num_stages": 2}
    return {"BM": 64, "BN": 32, "IEEE": False, "num_warps": 4, "num_stages": 3}


def _key_tile(dtype: torch.dtype, columns: int) -> dict[str, int | bool]:
    if dtype == torch.float32:
        return {"BM": 16, "BN": 32, "IEEE": True, "num_warps": 8, "num_stages": 1}
    if columns > 128:
        return {"BM": 64, "BN": 64, "IEEE": False, "num_warps": 8, "num_stages": 1}
    return {"BM": 32, "BN": 64, "IEEE": False, "num_warps": 4, "num_stages": 3}
