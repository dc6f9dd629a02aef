"""Sums whose bits do not depend on what stands beside the summed row."""

import torch
from torch import Tensor


def wide_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums of `x`: its own, at least float32."""
    return torch.promote_types(x.dtype, torch.float32)


def row_sums(x: Tensor) -> Tensor:
    """Return the sums [M] of contiguous rows [M, D].

    torch adds up each of several rows in one order, but a single one in another: in parallel
    pieces if it is long, and without SIMD if it is short. So a single row is given a twin.
    """
    if x.shape[0] != 1:
        return x.sum(dim=-1)
    return torch.cat((x, x)).sum(dim=-1)[:1]
