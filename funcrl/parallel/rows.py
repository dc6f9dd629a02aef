"""Which rows of a batch a rank has."""

import torch
from torch import Tensor

from funcrl.core import tree
from funcrl.core.arguments import checked
from funcrl.core.types import STREAMS, PackedBatch, Rows
from funcrl.parallel.mesh import Axis, Mesh


@checked
def own_rows(batch: Rows, mesh: Mesh, in_order: bool = False) -> Rows:
    """Return this rank's rows of a batch that was collated or packed whole, the same on all ranks.

    Weights are of the whole batch, so the sum of the ranks' gradients is the batch's. All ranks get
    the same number of rows, about as many tokens each; where the ranks do not divide the rows, some
    get a row without a sampled token or weight.

    Args:
        batch: the whole one.
        mesh: of all ranks.
        in_order: give each rank neighbouring rows, in halves or quarters of the batch, as a step
            with exact numerics adds them: 1, 2 and 4 ranks then have the same bits.

    Example:
        >>> import torch, funcrl
        >>> rollout = funcrl.Rollout(
        ...     tokens=torch.tensor([[1, 2, 3], [1, 4, 5], [1, 6, 7]]),
        ...     mask=torch.tensor([[False, True, True]] * 3), group=torch.tensor([0, 0, 0]),
        ...     behavior_logprobs=torch.full((3, 3), -2.0), rewards=torch.tensor([0.0, 1.0, 0.0]),
        ...     policy_version=torch.zeros(3, dtype=torch.int64))
        >>> batch = funcrl.collate(rollout, funcrl.grpo())
        >>> first = funcrl.parallel.Mesh(all=funcrl.parallel.Axis(size=2, rank=0))
        >>> funcrl.parallel.own_rows(batch, first).mask.any(dim=1)  # one row, and one of padding
        tensor([ True, False])
    """
    axis = mesh.all
    if axis.size == 1:
        return batch
    order = _in_order(batch, axis) if in_order else _balanced(batch, axis)
    own = torch.tensor(order, device=batch.mask.device)
    is_row = own >= 0
    rows = tree.map(lambda leaf: leaf[own.clamp(min=0)], batch)
    return rows if bool(is_row.all()) else _without(rows, is_row[:, None])


def num_own_rows(batch: Rows) -> Tensor:
    """Return how many rows of the whole batch `own_rows` gave this rank, without its padding."""
    return batch.positions.any(dim=1).sum()


def _balanced(batch: Rows, axis: Axis) -> list[int]:
    """Return the places of this rank's rows, -1 for a row that there is none for.

    The longest go to the ranks in turn, to and fro.
    """
    lengths = _num_tokens(batch)
    ranked = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    rounds = range(0, len(ranked), axis.size)
    taken = [
        start + (axis.size - 1 - axis.rank if number % 2 else axis.rank)
        for number, start in enumerate(rounds)
    ]
    return [ranked[place] if place < len(ranked) else -1 for place in taken]


def _in_order(batch: Rows, axis: Axis) -> list[int]:
    """Return the places of this rank's neighbouring rows.

    A step with exact numerics adds the sums of quarters of the batch in pairs, or of halves, or
    takes it whole, whichever can be had; a rank without a part has nothing to add.
    """
    count = len(batch.mask)
    parts = next(parts for parts in (4, 2, 1) if count % parts == 0)
    if parts >= axis.size and not parts % axis.size:
        rows = count // axis.size
        return list(range(axis.rank * rows, (axis.rank + 1) * rows))
    if axis.size % parts:
        rows = -(-count // axis.size)
        places = range(axis.rank * rows, (axis.rank + 1) * rows)
        return [place if place < count else -1 for place in places]
    rows, apart = count // parts, axis.size // parts
    if axis.rank % apart:
        return [-1] * rows
    part = axis.rank // apart
    return list(range(part * rows, (part + 1) * rows))


def _num_tokens(batch: Rows) -> list[int]:
    """Return how many tokens of each row a model computes for something."""
    if isinstance(batch, PackedBatch):
        return (batch.segment_ids >= 0).sum(dim=1).tolist()
    ends = torch.arange(1, batch.mask.shape[1] + 1, device=batch.mask.device) * batch.mask
    return ends.amax(dim=1).tolist()


def _without(rows: Rows, is_row: Tensor) -> Rows:
    """Return the rows with nothing to learn in those that only fill a rank's share."""
    nothing = {
        "positions": rows.positions.where(is_row, 0),  # as no row of a batch has
        "mask": rows.mask & is_row,
        "behavior_logprobs": rows.behavior_logprobs.where(is_row, 0.0),
        "advantages": rows.advantages.where(is_row, 0.0),
    }
    for name in STREAMS:
        if isinstance(weights := getattr(rows, name), Tensor):
            nothing[name] = weights.where(is_row, 0.0)
    if isinstance(rows, PackedBatch):  # padding, as in rows that `pack` adds
        nothing["segment_ids"] = rows.segment_ids.where(is_row, -1)
        if isinstance(rows.prefix_ids, Tensor):
            nothing["prefix_ids"] = rows.prefix_ids.where(is_row, -1)
    return rows._replace(**nothing)
