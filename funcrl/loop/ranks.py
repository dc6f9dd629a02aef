"""What the ranks of a run must agree on: its options, where it begins, and when it stops."""

import platform
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from funcrl.config import TrainConfig, to_plain
from funcrl.core import tree
from funcrl.core.process import VERSION, commit
from funcrl.core.types import TrainState
from funcrl.loop.build import Parts, empty_state, trained_like
from funcrl.parallel import Axis, Mesh, broadcast, gather_objects, shard, whole_leaf
from funcrl.rl.step import grpo_step
from funcrl.run.follower import Follower, Progress, WholeFn
from funcrl.run.record import Record


def check_ranks_agree(config: TrainConfig, facts: Mapping[str, str], mesh: Mesh) -> None:
    """Raise unless all ranks have the same versions, options and data.

    Args:
        config: the options of this rank.
        facts: of its task and its code.
        mesh: of the ranks.
    """
    sharing, wanted = mesh.shard.size, config.ranks.shard_size
    is_meant = (sharing > 1) == (config.shard != "none") and wanted in (None, sharing)
    if mesh.all.size > 1 and not is_meant:
        raise ValueError(
            f"train expects make_mesh(shard=N) of several ranks with --shard optimizer or state "
            f"(of --ranks.shard-size, if given), and of one with none, got {sharing} with "
            f"--shard {config.shard} and --ranks.shard-size {wanted}."
        )
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


def whole_like(parts: Parts) -> TrainState:
    """Return the state of one process, of tensors that have shapes and dtypes but no values."""
    step = grpo_step(parts.model_fn, optimizer=parts.optimizer)
    with FakeTensorMode(allow_non_fake_inputs=True):
        return step.init(dict(trained_like(parts)), parts.config.seed)


def empty_values(like: TrainState) -> TrainState:
    """Return a state on the CPU, of any values, to restore a checkpoint into."""
    empty: TrainState = tree.map(
        lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu"), like
    )
    return empty


def whole_state_fn(parts: Parts) -> WholeFn:
    """Return a function that puts a state together from the shards of all ranks, on the first one.

    All ranks call it; what the others get is of no use. The whole state is on the first one's CPU,
    and one leaf at a time is whole on a device.
    """
    axis, is_first = parts.mesh.shard, parts.mesh.all.rank == 0
    shapes = [tuple(leaf.shape) for leaf in tree.leaves(whole_like(parts))]

    def whole_state(state: TrainState) -> TrainState:
        leaves, unflatten = tree.flatten(state)
        for place, shape in enumerate(shapes):
            whole = whole_leaf(leaves[place], shape, axis)
            leaves[place] = whole.cpu() if is_first else whole.new_empty(())
        whole_tree: TrainState = unflatten(leaves)
        return whole_tree

    return whole_state


def go_on_together(record: Follower, parts: Parts) -> None:
    """Give each rank its part of the last finished step of the rank that records.

    Args:
        record: of this rank; on the first one it has resumed a whole state.
        parts: of the run.
    """
    mesh = parts.mesh
    if mesh.all.size == 1:
        return
    own = record.progress if isinstance(record, Record) else None
    known = None if own is None else (own.step, own.row, len(own.older), len(own.reference))
    step, row, *counts = of_first_rank(known, mesh.host)
    like = (empty_state(parts), *((dict(trained_like(parts)),) * count for count in counts))
    whole = like if mesh.shard.size == 1 else (whole_like(parts), *like[1:])
    leaves, unflatten = tree.flatten(like)
    given = leaves if own is None else tree.leaves((own.state, own.older, own.reference))
    for place, shape in enumerate(tuple(leaf.shape) for leaf in tree.leaves(whole)):
        local = leaves[place]
        sent = torch.empty(shape, dtype=local.dtype, device=local.device)
        if own is not None:
            sent = given[place].to(local.device)
        received = broadcast(sent, mesh.all)
        leaves[place] = received if local.shape == shape else shard(received, mesh.shard)
    state, older, reference = unflatten(leaves)
    record.go_on(Progress(step, state, row, older, reference))
