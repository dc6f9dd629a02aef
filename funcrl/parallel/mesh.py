"""The ranks of a run as a value: sizes, this rank's place, and the names of process groups."""

from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed

from funcrl.core.arguments import Count, FinitePositive, checked


class Axis(NamedTuple):
    """Ranks that share a collective, as one of them sees them; one rank alone by default."""

    size: int = 1
    rank: int = 0  # this one's number among them
    group: str = ""  # the name of their process group, as torch's functional collectives take it


class Mesh(NamedTuple):
    """The ranks of a run, as one of them sees them; one rank alone by default.

    It is a plain value: two ranks differ in the `rank` of its axes alone. The ranks are a grid of
    `data.size` times `shard.size`.
    """

    data: Axis = Axis()  # ranks that hold the same shards
    shard: Axis = Axis()  # ranks that hold the whole state together, each some rows of each leaf
    all: Axis = Axis()  # all ranks, each of which has rows of the batch of its own
    host: Axis = Axis()  # the same on a group of the CPU, for Python objects
    rollouts: Axis = Axis()  # one more, for the thread that draws while a step trains

    def __repr__(self) -> str:  # `Mesh()` for one rank, as the signatures that default to it show
        several = [f"{name}={axis}" for name, axis in self._asdict().items() if axis != Axis()]
        return f"Mesh({', '.join(several)})"


ALONE = Mesh()


@checked
def make_mesh(timeout: FinitePositive = 600.0, shard: Count = 1) -> Mesh:
    """Return the mesh of all ranks of torch.distributed; that of one rank where it has not begun.

    All ranks call it, in the same order as their other collectives: it makes process groups, with
    the backends that `torch.distributed.init_process_group` was given, and gloo.

    Args:
        timeout: seconds until a collective fails that a rank does not join.
        shard: how many neighbouring ranks hold a state together; it divides the number of ranks.

    Example:
        >>> import funcrl
        >>> mesh = funcrl.parallel.make_mesh()  # in one process, without torchrun
        >>> mesh.all
        Axis(size=1, rank=0, group='')
    """
    size = distributed.get_world_size() if distributed.is_initialized() else 1
    if size % shard:
        raise ValueError(f"make_mesh expects shard to divide the {size} ranks, got {shard}.")
    if size == 1:
        return ALONE
    rank, limit = distributed.get_rank(), timedelta(seconds=timeout)

    def axis(backend: str | None = None) -> Axis:
        group: Any = distributed.new_group(backend=backend, timeout=limit)
        return Axis(size, rank, group.group_name)

    def axis_among(parts: list[list[int]]) -> Axis:
        own = Axis()
        for ranks in parts if len(parts[0]) > 1 else []:  # each rank helps to make each group
            group: Any = distributed.new_group(ranks, timeout=limit)
            if rank in ranks:
                own = Axis(len(ranks), ranks.index(rank), group.group_name)
        return own

    blocks = [list(range(first, first + shard)) for first in range(0, size, shard)]
    columns = [list(range(first, size, shard)) for first in range(shard)]
    every = axis()
    return Mesh(
        data=every if shard == 1 else axis_among(columns),
        shard=every if shard == size else axis_among(blocks),
        all=every,
        host=axis("gloo"),
        rollouts=axis("gloo"),
    )
