"""The last link of an optimizer: minus the learning rate, kept as a tensor in the state."""

from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from funcrl import checks, tree
from funcrl.optim.base import zero_count
from funcrl.optim.schedules import Schedule, constant
from funcrl.types import Absent, GradientTransformation, Params, Tree

LearningRate: TypeAlias = float | Schedule


class ScaleByLearningRateState(NamedTuple):
    """The number of updates done, and the rate that the next one will use."""

    num_updates: Tensor  # [] int64
    learning_rate: Tensor  # [] float64, as a 0-d tensor it widens no parameter


def scale_by_learning_rate(learning_rate: LearningRate) -> GradientTransformation:
    """Return the transformation `-learning_rate * g`.

    The rate is a 0-d tensor in the state, so that changing it recompiles nothing. A number stays
    until somebody replaces it there; a schedule is evaluated for the next update at each one.

    Args:
        learning_rate: a number, or a schedule: a function of the number of updates done.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.scale_by_learning_rate(0.5)
        >>> tx.update({"w": torch.ones(1)}, tx.init({"w": torch.ones(1)}), {})[0]
        {'w': tensor([-0.5000])}
    """
    if callable(learning_rate):
        schedule: Schedule | None = learning_rate
        first: Schedule = learning_rate
    else:
        checks.check_range(
            "scale_by_learning_rate", "learning_rate", learning_rate, 0.0, float("inf")
        )
        schedule, first = None, constant(learning_rate)

    def init(params: Params) -> ScaleByLearningRateState:
        none_yet = zero_count(params)
        return ScaleByLearningRateState(none_yet, _as_rate(first(none_yet), none_yet))

    def update(
        grads: Tree, state: ScaleByLearningRateState, params: Params
    ) -> tuple[Tree, ScaleByLearningRateState]:
        del params
        num_updates = state.num_updates + 1
        following = state.learning_rate
        if schedule is not None:
            following = _as_rate(schedule(num_updates), num_updates)
        updates = tree.scale(grads, -state.learning_rate)
        return updates, ScaleByLearningRateState(num_updates, following)

    return GradientTransformation(init, update)


def current_learning_rate(opt_state: Any) -> Tensor | Absent:
    """Return the rate that the next update will use, of the first optimizer in the state.

    It is `()` where no part of the optimizer is a `scale_by_learning_rate`.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.adamw(1e-3)
        >>> funcrl.optim.current_learning_rate(tx.init({"w": torch.zeros(1)}))
        tensor(0.0010, dtype=torch.float64)
    """
    nodes = optree.tree_leaves(
        opt_state, is_leaf=lambda node: isinstance(node, ScaleByLearningRateState)
    )
    rates = [node.learning_rate for node in nodes if isinstance(node, ScaleByLearningRateState)]
    return rates[0] if rates else ()


def _as_rate(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a schedule's value as a 0-d float64 tensor, also where it gave a Python number."""
    rate = torch.as_tensor(value, dtype=torch.float64, device=like.device)
    if rate.ndim:
        raise ValueError(
            f"scale_by_learning_rate expects learning_rate to return one number, got a tensor of "
            f"shape {list(rate.shape)}."
        )
    return rate
