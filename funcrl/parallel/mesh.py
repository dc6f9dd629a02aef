"""The ranks of a run as a value: sizes, this rank's place, and the names of process groups."""

from datetime import timedelta
from typing import Any, NamedTuple

from torch import distributed


class Axis(NamedTuple):
    """Ranks that share a collective, as one of them sees them; one rank alone by default."""

    size: int = 1
    rank: int = 0  # this one's number among them
    group: str = ""  # the name of their process group, as torch's functional collectives take it


class Mesh(NamedTuple):
    """The ranks of a run, as one of them sees them; one rank alone by default.

    It is a plain value: two ranks differ in the `rank` of its axes alone.
    """

    data: Axis = Axis()  # the ranks, each with rows of its own, that hold the same parameters
    host: Axis = Axis()  # the same ranks on a group of the CPU, for Python objects
    rollouts: Axis = Axis()  # one more, for the thread that draws while a step trains


ALONE = Mesh()


def make_mesh(timeout: float = 600.0) -> Mesh:
    """Return the mesh of all ranks of torch.distributed; that of one rank where it has not begun.

    All ranks call it, in the same order as their other collectives: it makes process groups, with
    the backends that `torch.distributed.init_process_group` was given, and gloo.

    Args:
        timeout: seconds until a collective fails that a rank does not join.

    Example:
        >>> import funcrl
        >>> mesh = funcrl.parallel.make_mesh()  # in one process, without torchrun
        >>> mesh.data
        Axis(size=1, rank=0, group='')
    """
    if not (timeout > 0):
        raise ValueError(f"make_mesh expects timeout > 0, got {timeout}.")
    if not distributed.is_initialized() or distributed.get_world_size() == 1:
        return Mesh()
    size, rank = distributed.get_world_size(), distributed.get_rank()

    def made(backend: str | None) -> Axis:
        group: Any = distributed.new_group(backend=backend, timeout=timedelta(seconds=timeout))
        return Axis(size, rank, group.group_name)

    return Mesh(made(None), made("gloo"), made("gloo"))
