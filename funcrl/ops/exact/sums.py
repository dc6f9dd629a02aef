"""Sums whose bits do not depend on what stands beside the summed row."""

import functools

import torch
from torch import Tensor


def row_groups(rows: int, width: int) -> list[slice]:
    """Return the rows [M, D] in groups that fit into the processor's cache."""
    step = max(1, 2**17 // max(width, 1))
    return [slice(start, start + step) for start in range(0, rows, step)]


def row_sums(x: Tensor) -> Tensor:
    """Return the sums [M] of contiguous rows [M, D].

    torch adds up each of several rows in one order, but a single one in another: in parallel
    pieces if it is long, and without SIMD if it is short. So a single row is given a twin.
    """
    if x.shape[0] != 1:
        return x.sum(dim=-1)
    return torch.cat((x, x)).sum(dim=-1)[:1]


def exp(x: Tensor) -> Tensor:
    """Return e^x of a fresh x <= 0, in its memory, and about 1e-38 where that is smaller.

    The library takes a hundred times as long where a result is not a normal number, as for -inf.
    """
    return x.clamp_(min=-87.0 if x.dtype == torch.float32 else -708.0).exp_()


def exp_or_zero(x: Tensor) -> Tensor:
    """Return e^x of a fresh x <= 0, in its memory, and 0 where that is about 1e-38 or smaller."""
    return torch.threshold_(exp(x), 1.7e-38 if x.dtype == torch.float32 else 3.4e-308, 0)


def key_sums(x: Tensor) -> Tensor:
    """Return the sums [P, R, 1] of x [P, R, S], S a multiple of 16, that zeros after it leave."""
    block = 64 if _zeros_are_nothing(x.dtype) else 16
    if x.shape[0] * x.shape[1] == 1:
        return key_sums(x.expand(-1, 2, -1).contiguous())[:, :1]
    total = x[..., :block].sum(dim=-1, keepdim=True)
    for start in range(block, x.shape[-1], block):
        total.add_(x[..., start : start + block].sum(dim=-1, keepdim=True))
    return total


@functools.cache
def _zeros_are_nothing(dtype: torch.dtype) -> bool:
    """Return whether 64 numbers have the sum of the first 16, 32 or 48 if the others are 0."""
    draw = torch.Generator(device="cpu").manual_seed(0)
    x = torch.rand(64, 64, generator=draw, dtype=dtype, device="cpu")
    shorter = [(x.clone()[:, :count], count) for count in (16, 32, 48)]
    filled = [torch.nn.functional.pad(part, (0, 64 - count)).sum(-1) for part, count in shorter]
    return all(torch.equal(a.sum(-1), b) for (a, _), b in zip(shorter, filled, strict=True))


def halving_sum(x: Tensor, dim: int) -> Tensor:
    """Return the sum along an axis of a fresh x, in its memory: one half is added to the other.

    Each addition is of two numbers, so that the bits are those of any other machine, too.
    """
    while (size := x.shape[dim]) > 1:
        half = (size + 1) // 2
        x.narrow(dim, 0, size - half).add_(x.narrow(dim, half, size - half))
        x = x.narrow(dim, 0, half)
    return x.squeeze(dim)
