"""Attention of single queries over keys and values that lie in the blocks of a shared cache."""

import torch
from torch import Tensor

from funcrl.ops.exact.cpu.attention import attend_from_zero


def attend_paged(q: Tensor, cache: Tensor, tables: Tensor, request: Tensor, last: Tensor) -> Tensor:
    """Return [N, H, C]: query n attends to places 0..last[n] of its request.

    Args:
        q: [N, H, C].
        cache: [blocks, K, size, 2C], a place's key beside its value, of any strides.
        tables: [R, W] int64; place p of a request is in block `tables[request, p // size]`.
        request: [N] int64.
        last: [N] int64.
    """
    width, size = q.shape[-1], cache.shape[2]
    longest = int(last.amax()) + 1 if last.numel() else 0
    places = torch.minimum(torch.arange(longest, device=q.device), last[:, None]).clamp_(min=0)
    block = tables[request[:, None], places // size]
    both = cache[block, :, places % size].transpose(1, 2)  # [N, K, longest, 2C]
    out, _ = attend_from_zero(q[:, :, None], both[..., :width], both[..., width:], last[:, None])
    return out[:, :, 0]
