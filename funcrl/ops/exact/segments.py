"""Attention of packed rows on a CPU as segments, and sums whose bits are of their row alone."""

import functools
from typing import NamedTuple

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


# About how many scores are alive at a time.
SCORES = 2**19


def mask_of(last: Tensor, num_places: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """Return [B or 1, 1, 1, T, S], 0 where a query sees the key and -inf where it does not."""
    if last.shape[0] > 1 and torch.equal(last[1:], last[:-1]):
        last = last[:1]
    places = torch.arange(num_places, dtype=dtype, device=last.device)
    distance = (last.to(dtype) + 0.5)[:, None, None, :, None] - places
    if window is not None:  # also below 0 where a key stands too far before the query
        distance = torch.minimum(distance, window - distance)
    return distance.mul_(torch.inf).clamp_(max=0)


def clear(x: Tensor, top: Tensor) -> Tensor:
    """Return keys or values [B, K, S, C] with 0 at places after top [B]."""
    hidden = torch.arange(x.shape[2], device=x.device) > top[:, None]
    return x.masked_fill(hidden[:, None, :, None], 0)


class Segments(NamedTuple):
    """The segments [N] of packed rows, their queries padded to one length L.

    A query or key that a segment lacks is some place of the row, and hidden by `last`.
    """

    row: Tensor  # [N, 1] int64
    query: Tensor  # [N, L] int64, places in the row
    key: Tensor  # [N, S] int64, places in the row
    last: Tensor  # [N, L] int64, the last key that a query sees, counted in its segment; -1 none
    real: Tensor  # [N, L] bool


def common_first(first: Tensor, last: Tensor) -> int | None:
    """Return the one first key of all queries that see any, or None if there are several."""
    seen = first[last >= first]
    if not seen.numel():
        return 0
    low, high = seen.aminmax()
    return int(low) if low == high else None


def split_segments(first: Tensor, last: Tensor, shared: Tensor | None = None) -> list[Segments]:
    """Return the segments of all rows, those of the same rounded length together.

    The keys of a shared prefix [B, T, 2] stand before a segment's own ones.
    """
    length = first.shape[1]
    live = last >= first
    fresh = torch.ones_like(live)
    fresh[:, 1:] = (first[:, 1:] != first[:, :-1]) | (live[:, 1:] != live[:, :-1])
    row, start = (fresh & live).nonzero(as_tuple=True)
    ends = torch.full_like(first, length)
    places = torch.arange(length, device=first.device)
    nexts = torch.where(fresh, places, length).flip(1).cummin(dim=1).values.flip(1)
    ends[:, :-1] = nexts[:, 1:]
    count = ends[row, start] - start
    rounded = round_length(count)
    if shared is None:
        shared = first.new_zeros(*first.shape, 2)
    keys_of = _Keys(first[row, start], *shared[row, start].unbind(-1))
    num_keys = last[row, start + count - 1] - keys_of.first + 1 + keys_of.shared
    wanted = torch.stack((rounded, round_length(num_keys)), dim=1)
    groups = []
    for queries, keys in wanted.unique(dim=0).tolist():
        chosen = ((rounded == queries) & (wanted[:, 1] == keys)).nonzero().squeeze(1)
        groups.append(
            _group(
                row[chosen],
                start[chosen],
                count[chosen],
                _Keys(*(part[chosen] for part in keys_of)),
                last,
                queries,
                keys,
            )
        )
    return groups


def round_length(length: Tensor) -> Tensor:
    """Return lengths rounded up to multiples of 8, so that few different ones are left."""
    return (length + 7) // 8 * 8


class _Keys(NamedTuple):
    """Where the keys of segments [N] lie: those of a prefix, then the segment's own."""

    first: Tensor  # of its own
    prefix: Tensor  # the first one of the prefix
    shared: Tensor  # the number of those of the prefix

    def place(self, number: Tensor) -> Tensor:
        """Return the places in a row of the keys of these numbers [N, S]."""
        first, prefix, shared = (part[:, None] for part in self)
        return torch.where(number < shared, prefix + number, first - shared + number)


def _group(
    row: Tensor, start: Tensor, count: Tensor, keys_of: _Keys, last: Tensor, queries: int,
    keys: int,
) -> Segments:  # fmt: skip
    offsets = torch.arange(queries, device=last.device)
    real = offsets < count[:, None]
    query = torch.where(real, start[:, None] + offsets, start[:, None])
    row = row[:, None]
    before = keys_of.shared - keys_of.first  # a key's place in the row to its number
    own_last = torch.where(real, last[row, query] + before[:, None], -1)
    number = torch.arange(keys, device=last.device)
    key = keys_of.place(torch.minimum(number, own_last.amax(dim=1, keepdim=True)))
    return Segments(row, query, key, own_last, real)


def spans_of_rows(shared: Tensor | None) -> Tensor | None:
    """Return [..., T, 2] as [B, T, 2]."""
    return None if shared is None else shared.reshape(-1, *shared.shape[-2:])


def as_batch(x: Tensor) -> Tensor:
    """Return [..., H, T, C] as [B, H, T, C]."""
    return x.reshape(-1, *x.shape[-3:])
