"""Python objects of all ranks."""

from typing import Any

from torch import distributed
from torch.distributed import distributed_c10d

from funcrl.core.arguments import checked
from funcrl.parallel.mesh import Axis

_C10D: Any = distributed_c10d


@checked
def gather_objects(value: Any, axis: Axis) -> list[Any]:
    """Return what each rank of an axis gives, in their order.

    Values travel as pickles between the ranks of one run, which trust each other.

    Args:
        value: anything that can be pickled.
        axis: `mesh.host`, or `mesh.rollouts` in the thread that draws.

    Example:
        >>> import funcrl
        >>> funcrl.parallel.gather_objects("mine", funcrl.parallel.Mesh().host)
        ['mine']
    """
    if axis.size == 1:
        return [value]
    found: list[Any] = [None] * axis.size
    distributed.all_gather_object(found, value, group=_C10D._resolve_process_group(axis.group))
    return found
