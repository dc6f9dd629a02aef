"""The one door to mutation: a step that writes its new state into the memory of the old one."""

from typing import Any

import torch
from torch import Tensor

from funcrl.core import tree
from funcrl.core.arguments import checked
from funcrl.core.types import Metrics, Rows, Step, TrainState, Tree
from funcrl.graph.aliases import sharing_places


@checked
def donate(step: Step) -> Step:
    """Return the step that consumes its state: the same bits, in the memory of the state it got.

        state, metrics = donate(step)(state, batch)

    The state that is passed in is used up: its tensors hold the new values afterwards, so keep the
    returned state and nothing of the old one. Between steps one copy of parameters and moments is
    alive instead of two. Traced or compiled, the writes are part of the graph, at its end:
    `funcrl.compile_step(funcrl.donate(step), state, batch, config)`. `init` copies the parameters
    that it gets, so those stay as they are.

    Args:
        step: from `funcrl.grpo_step`, or any other of its form.

    Example:
        >>> import torch, funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=7))
        >>> step = funcrl.donate(funcrl.grpo_step(funcrl.logprob_fn(model)))
        >>> params = funcrl.init_params(model, seed=0)
        >>> state, ones = step.init(params), torch.ones(2, 3)
        >>> batch = funcrl.Batch(ones.long(), ones.long(), ones > 0, -ones, ones, ones)
        >>> new, _ = step(state, batch)
        >>> new.params["embed.weight"] is state.params["embed.weight"], new.step
        (True, tensor(1))
    """

    @checked
    @torch.no_grad()
    def update(state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        new, metrics = step.update(state, batch)
        return _write(state, new, metrics)

    return Step(step.init, update)


def _write(state: TrainState, new: TrainState, metrics: Metrics) -> tuple[TrainState, Metrics]:
    """Write each new leaf into the old one at its place, and return the old tree."""
    tree.check_same_structure("donate", state, new)
    old_leaves, unflatten = tree.flatten(state)
    check_own_memory(state)
    own = {_storage(leaf) for leaf in old_leaves}
    # Read before anything is written: what is still in the old state's memory, such as the
    # learning rate that is reported, or a leaf that moves to another place.
    metrics = tree.map(lambda leaf: leaf.clone() if _storage(leaf) in own else leaf, metrics)
    written = [
        leaf if leaf is old or _storage(leaf) not in own else leaf.clone()
        for old, leaf in zip(old_leaves, tree.leaves(new), strict=True)
    ]
    for path, old, leaf in zip(tree.paths(state), old_leaves, written, strict=True):
        if (old.shape, old.dtype, old.device) != (leaf.shape, leaf.dtype, leaf.device):
            raise ValueError(
                f"donate expects a step that keeps shapes and dtypes, got {path!r} of "
                f"{list(old.shape)} {old.dtype} and then {list(leaf.shape)} {leaf.dtype}."
            )
        if leaf is not old:
            old.copy_(leaf)
    return unflatten(old_leaves), metrics


def check_own_memory(state: Tree) -> None:
    """Refuse a state in which two leaves share memory."""
    for first, second, *_ in sharing_places(tree.leaves(state)):
        paths = tree.paths(state)
        raise ValueError(
            f"donate expects a state whose leaves have memory of their own, got one piece "
            f"for {paths[first]!r} and {paths[second]!r}; init copies."
        )


def _storage(leaf: Tensor) -> Any:
    return leaf.untyped_storage()._cdata
