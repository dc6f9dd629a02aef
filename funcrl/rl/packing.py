"""Packed batches: many samples in rows of one length, a group's prompt perhaps once for all.

A batch of rollouts has samples of many lengths, and the prompt of a group once a sample. Packed, a
row holds nothing twice and little padding, and its shape is always the same.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.core import checks, tree
from funcrl.core.arguments import Count, checked
from funcrl.core.rows import row_ends
from funcrl.core.types import Absent, Algorithm, Batch, PackedBatch, Rollout
from funcrl.rl.batching import collate, sampled_tokens

_MOST_TOKENS = 1 << 28  # of a packed batch: the indices alone take 2 GiB


class _Group(NamedTuple):
    """Samples that begin with the same tokens, or a sample by itself."""

    prefix: int  # the number of tokens that are laid once
    samples: tuple[int, ...]  # their rows in the rollout


_GroupsFn: TypeAlias = Callable[[Batch, Sequence[int]], list[_Group]]


class _Piece(NamedTuple):
    """Consecutive tokens of a rollout that form a segment."""

    sample: int
    start: int
    stop: int
    prefix: int  # the segment whose tokens they see too, -1 for none


@checked
def pack(
    rollout: Rollout,
    algorithm: Algorithm,
    length: Count,
    ref_logprobs: Tensor | Absent = (),
    row_multiple: Count = 1,
    teacher_logprobs: Tensor | Absent = (),
) -> PackedBatch:
    """Return the same batch with the samples laid end to end in rows of `length`.

    Each sample, up to its last sampled token, goes whole into the first row with room, longest
    first. Weights are made before packing, so that the loss is the same number.

    Args:
        rollout: B = N prompts x G samples, padded on the right.
        algorithm: whose `advantage` and weights to use.
        length: tokens a row; no sample may be longer.
        ref_logprobs: [B, T] of the reference model, for a KL penalty.
        row_multiple: rows of padding fill the batch up to a multiple of so many rows: a compiled
            step then meets few shapes, and micro-batches are of equal size.
        teacher_logprobs: [B, T] of the teacher, as in `collate`.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.tensor([[5, 6, 7], [5, 8, 0]]), group=torch.tensor([0, 0]),
        ...     mask=torch.tensor([[False, True, True], [False, True, False]]),
        ...     behavior_logprobs=torch.zeros(2, 3), rewards=torch.tensor([0.0, 1.0]),
        ...     policy_version=torch.zeros(2, dtype=torch.int64))
        >>> packed = funcrl.pack(rollout, funcrl.grpo(), length=6)
        >>> packed.tokens, packed.segment_ids
        (tensor([[5, 6, 7, 5, 8, 0]]), tensor([[ 0,  0,  0,  1,  1, -1]]))
    """
    batch = collate(rollout, algorithm, ref_logprobs, teacher_logprobs)
    return _packed("pack", batch, length, row_multiple, _alone)[0]


@checked
def pack_groups(
    rollout: Rollout,
    algorithm: Algorithm,
    length: Count,
    ref_logprobs: Tensor | Absent = (),
    row_multiple: Count = 1,
    teacher_logprobs: Tensor | Absent = (),
) -> PackedBatch:
    """Return the same batch with the prompt of a group once for all of its samples in a row.

    A prompt but for its last token is a segment of its own, which the samples see: each is the
    prompt's last token and the completion. Samples share what their tokens before the first sampled
    one have in common, if they are all equal. A group is divided, and its prompt repeated, if it
    is longer than a row or if that saves rows. The loss is the same number as that of `collate`'s
    batch.

    Args:
        rollout: B = N prompts x G samples, padded on the right.
        algorithm: whose `advantage` and weights to use.
        length: tokens a row; no sample, its prompt included, may be longer.
        ref_logprobs: [B, T] of the reference model, for a KL penalty.
        row_multiple: rows of padding fill the batch up to a multiple of so many rows, as in `pack`.
        teacher_logprobs: [B, T] of the teacher, as in `collate`.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.tensor([[4, 5, 6, 7], [4, 5, 8, 0]]), group=torch.tensor([0, 0]),
        ...     mask=torch.tensor([[False, False, True, True], [False, False, True, False]]),
        ...     behavior_logprobs=torch.zeros(2, 4), rewards=torch.tensor([0.0, 1.0]),
        ...     policy_version=torch.zeros(2, dtype=torch.int64))
        >>> packed = funcrl.pack_groups(rollout, funcrl.grpo(), length=7)
        >>> packed.tokens, packed.positions
        (tensor([[4, 5, 6, 7, 5, 8, 0]]), tensor([[0, 1, 2, 3, 1, 2, 0]]))
        >>> packed.segment_ids, packed.prefix_ids
        (tensor([[ 0,  1,  1,  1,  2,  2, -1]]), tensor([[-1,  0,  0,  0,  0,  0, -1]]))
    """
    return _with_prefixes(
        "pack_groups",
        collate(rollout, algorithm, ref_logprobs, teacher_logprobs),
        length,
        row_multiple,
    )


@checked
def pack_batch(batch: Batch, length: Count, row_multiple: Count = 1) -> PackedBatch:
    """Return the samples of a batch as `pack` lays them: what `minibatches` divided, for one.

    Args:
        batch: of one sample a row, padded on the right.
        length: tokens a row; no sample may be longer.
        row_multiple: rows of padding fill the batch up to a multiple of so many rows.

    Example:
        >>> import torch, funcrl
        >>> mask, nothing = torch.tensor([[False, True, False]] * 2), torch.zeros(2, 3)
        >>> tokens, places = torch.tensor([[5, 6, 0], [7, 8, 0]]), torch.arange(3).repeat(2, 1)
        >>> batch = funcrl.Batch(tokens, places, mask, nothing, nothing, nothing)
        >>> funcrl.packing.pack_batch(batch, length=4).tokens
        tensor([[5, 6, 7, 8]])
    """
    return _packed("pack_batch", batch, length, row_multiple, _alone)[0]


@checked
def pack_batch_groups(batch: Batch, length: Count, row_multiple: Count = 1) -> PackedBatch:
    """Return the samples of a batch as `pack_groups` lays them, each prompt once a row.

    Args:
        batch: of one sample a row, padded on the right.
        length: tokens a row; no sample, its prompt included, may be longer.
        row_multiple: rows of padding fill the batch up to a multiple of so many rows.

    Example:
        >>> import torch, funcrl
        >>> mask, nothing = torch.tensor([[False, False, True]] * 2), torch.zeros(2, 3)
        >>> tokens, places = torch.tensor([[4, 5, 6], [4, 5, 7]]), torch.arange(3).repeat(2, 1)
        >>> batch = funcrl.Batch(tokens, places, mask, nothing, nothing, nothing)
        >>> funcrl.packing.pack_batch_groups(batch, length=6).tokens
        tensor([[4, 5, 6, 5, 7, 0]])
    """
    return _with_prefixes("pack_batch_groups", batch, length, row_multiple)


def _with_prefixes(function: str, batch: Batch, length: int, multiple: int) -> PackedBatch:
    packed, prefix_ids = _packed(function, batch, length, multiple, _by_prompt)
    return packed._replace(prefix_ids=prefix_ids)


def _packed(
    function: str, batch: Batch, length: int, multiple: int, groups_of: _GroupsFn
) -> tuple[PackedBatch, Tensor]:
    """Return the packed batch, and its prefix_ids."""
    checks.check_rank(function, "batch.tokens", batch.tokens, "BT")
    sampled = sampled_tokens(batch)
    # One past the last sampled token; a sample without one has nothing to train on or to report.
    sizes: list[int] = row_ends(sampled).tolist()
    if max(sizes) > length:
        row = sizes.index(max(sizes))
        raise ValueError(
            f"{function} expects samples of at most {length} tokens, got {max(sizes)} in row {row}."
        )
    rows = _fill_rows(groups_of(batch, sizes), sizes, length)
    return _laid(function, batch, [_pieces(row, sizes) for row in rows], length, multiple)


def _alone(_: Batch, sizes: Sequence[int]) -> list[_Group]:
    """Return a group for each sample with sampled tokens."""
    return [_Group(0, (sample,)) for sample, size in enumerate(sizes) if size]


def _by_prompt(batch: Batch, sizes: Sequence[int]) -> list[_Group]:
    """Return the samples with sampled tokens, those of equal prompts together.

    A prompt is the tokens before the first sampled one, with their positions. Its last token is
    left to each sample, because it predicts the first one of a completion.
    """
    found: dict[tuple[int, bytes, bytes], list[int]] = {}
    starts = sampled_tokens(batch).to(torch.int64).argmax(dim=1).tolist()
    tokens, positions = (each.cpu().numpy() for each in (batch.tokens, batch.positions))
    for sample, start in enumerate(starts):
        if sizes[sample]:
            prompt = tokens[sample, :start].tobytes(), positions[sample, :start].tobytes()
            found.setdefault((start, *prompt), []).append(sample)
    return [_Group(max(start - 1, 0), tuple(each)) for (start, *_), each in found.items()]


def _fill_rows(groups: Sequence[_Group], sizes: Sequence[int], length: int) -> list[list[_Group]]:
    """Return the groups of each row, in as few rows as either of two ways to fill them takes.

    All rows have the same length and cost the same, so that few rows matter, and not which. Whole
    groups lay a prompt once but leave room at the end of a row, which divided ones fill.
    """
    whole = _first_fit(groups, sizes, length, divides=False)
    if all(len(group.samples) == 1 for group in groups):
        return whole
    return min(whole, _first_fit(groups, sizes, length, divides=True), key=len)


def _first_fit(
    groups: Sequence[_Group], sizes: Sequence[int], length: int, divides: bool
) -> list[list[_Group]]:
    """Return the groups of each row: first-fit decreasing.

    A group goes whole into the first row with room. If there is none, the row in which most of its
    samples find room takes those, and the rest goes on: a new row is one to choose from, or with
    `divides` only if no row has room for a sample.
    """
    rows: list[list[_Group]] = []
    room: list[int] = []

    def fitting(group: _Group, left: int) -> tuple[int, ...]:
        """Return the samples that fit into a row with so much room, longest first."""
        taken: list[int] = []
        left -= group.prefix
        for sample in group.samples:
            if sizes[sample] - group.prefix <= left:
                left -= sizes[sample] - group.prefix
                taken.append(sample)
        return tuple(taken)

    def tokens_of(group: _Group) -> int:
        return group.prefix + sum(sizes[sample] - group.prefix for sample in group.samples)

    for group in sorted(groups, key=tokens_of, reverse=True):
        rest = group._replace(samples=tuple(sorted(group.samples, key=lambda each: -sizes[each])))
        while rest.samples:
            taken: tuple[int, ...] = ()
            shortest = sizes[rest.samples[-1]]
            for at, left in enumerate(room if divides else [*room, length]):
                choice = fitting(rest, left) if left >= shortest else ()
                if len(choice) > len(taken):
                    row, taken = at, choice
                    if len(taken) == len(rest.samples):
                        break
            if not taken:
                row, taken = len(rows), fitting(rest, length)
            if row == len(rows):
                rows.append([])
                room.append(length)
            placed = rest._replace(samples=taken)
            rows[row].append(placed)
            room[row] -= tokens_of(placed)
            gone = {*taken}
            rest = rest._replace(samples=tuple(each for each in rest.samples if each not in gone))
    return rows


def _pieces(row: Sequence[_Group], sizes: Sequence[int]) -> list[_Piece]:
    """Return the segments of a row in order; what a sample alone has is no prefix."""
    pieces: list[_Piece] = []
    for prefix, samples in row:
        if prefix == 0 or len(samples) == 1:
            pieces += [_Piece(sample, 0, sizes[sample], -1) for sample in samples]
            continue
        shared = len(pieces)
        pieces.append(_Piece(samples[0], 0, prefix, -1))
        pieces += [_Piece(sample, prefix, sizes[sample], shared) for sample in samples]
    return pieces


def _laid(
    function: str, batch: Batch, rows: Sequence[list[_Piece]], length: int, multiple: int
) -> tuple[PackedBatch, Tensor]:
    """Return rows of the pieces, and their prefix_ids."""
    num_rows = max(-(-len(rows) // multiple), 1) * multiple
    if num_rows * length > _MOST_TOKENS:
        raise ValueError(
            f"{function} expects packed rows of at most {_MOST_TOKENS:,} tokens in all, got "
            f"{num_rows:,} rows of {length:,}."
        )
    width, device = batch.mask.shape[1], batch.mask.device
    # Of each segment: its first token's place in the packed batch and in the padded one, its
    # number in its row, the segment whose tokens it sees too, and its length.
    segments: list[tuple[int, int, int, int, int]] = []
    for row, pieces in enumerate(rows):
        place = row * length
        for number, (sample, start, stop, prefix) in enumerate(pieces):
            segments.append((place, sample * width + start, number, prefix, stop - start))
            place += stop - start
    table = torch.tensor(segments, dtype=torch.int64, device=device).reshape(-1, 5)
    lengths = table[:, 4]
    places, sources, *numbers = torch.repeat_interleave(table[:, :4], lengths, dim=0).T
    within = torch.arange(len(places), device=device)
    within -= torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)

    def laid(values: Tensor) -> Tensor:
        """Return values of tokens at their places in the packed batch, -1 where there is none."""
        empty = torch.full((num_rows * length,), -1, dtype=torch.int64, device=device)
        return empty.index_copy(0, places + within, values).view(num_rows, length)

    segment_ids, prefix_ids = map(laid, numbers)
    packed: Batch = tree.map(_gathering(laid(sources + within)), batch)
    return PackedBatch(segment_ids=segment_ids, **packed._asdict()), prefix_ids


def _gathering(source: Tensor) -> Callable[[Tensor], Tensor]:
    """Return the function that takes values from their places in a batch, 0 where there is none."""

    def gather(values: Tensor) -> Tensor:
        taken = values.reshape(-1)[source.clamp(min=0)]
        return torch.where(source < 0, torch.zeros_like(taken), taken)

    return gather
