"""What the ranks of a run must agree on: its options, where it begins, and when it stops."""

import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch

from funcrl.config import TrainConfig, to_plain
from funcrl.core.process import VERSION, commit
from funcrl.core.types import Params, TrainState
from funcrl.parallel import Axis, Mesh, broadcast_tree, gather_objects
from funcrl.run.follower import Follower
from funcrl.run.record import Progress, Record


def check_ranks_agree(config: TrainConfig, facts: Mapping[str, str], mesh: Mesh) -> None:
    """Raise unless all ranks have the same versions, options and data.

    Args:
        config: the options of this rank.
        facts: of its task and its code.
        mesh: of the ranks.
    """
    if mesh.host.size > 1 and config.generator == "vllm" and config.vllm.form == "server":
        raise ValueError(
            f"train expects --vllm.form native or unified, in the process of each of its "
            f"{mesh.host.size} ranks, got server: such servers belong to one trainer."
        )
    own = _flat(to_plain(config)) | {f"the fact {name}": text for name, text in facts.items()}
    own |= {
        "the version of funcrl": f"{VERSION} {commit() or ''}".strip(),
        "the version of torch": torch.__version__,
        "the version of Python": platform.python_version(),
    }
    first, *others = gather_objects(own, mesh.host)
    for rank, other in enumerate(others, start=1):
        for name in sorted({*first, *other}):
            if first.get(name) != other.get(name):
                raise ValueError(
                    f"train expects the same options, data and versions on all ranks, got {name} "
                    f"{first.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}."
                )


def _flat(values: Mapping[str, Any], prefix: str = "--") -> dict[str, Any]:
    """Return nested options by their names on the command line."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        option = f"{prefix}{name.replace('_', '-')}"
        flat |= _flat(value, f"{option}.") if isinstance(value, Mapping) else {option: value}
    return flat


def of_first_rank(value: Any, axis: Axis) -> Any:
    """Return what the first rank gives; what others give is not read."""
    return gather_objects(value if axis.rank == 0 else None, axis)[0]


def agreed(stop: Callable[[], bool], mesh: Mesh) -> Callable[[], bool]:
    """Return a function that says on all ranks whether one of them is to stop."""
    return lambda: any(gather_objects(stop(), mesh.host))


def go_on_together(record: Record | Follower, like: TrainState, mesh: Mesh) -> None:
    """Give each rank the last finished step of the rank that records.

    Args:
        record: of this rank, which must have begun or resumed on the first.
        like: a state of the run's structure.
        mesh: of the ranks.
    """
    own = None if isinstance(record, Follower) else record.progress
    known = None if own is None else (own.step, own.row, len(own.older))
    step, row, num_older = of_first_rank(known, mesh.host)
    state, older = (like, (like.params,) * num_older) if own is None else (own.state, own.older)
    state, older = broadcast_tree((state, older), mesh.all)
    if isinstance(record, Follower):
        record.go_on(Progress(step, state, row, older))


def reference_of_first(reference: Params, mesh: Mesh) -> Params:
    """Return the reference policy of the rank that records."""
    return dict(broadcast_tree(dict(reference), mesh.all))
