"""Learning rates: schedules, and scaling by minus the rate, the last link of an optimizer."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import optree
import torch
from torch import Tensor

from funcrl.core import checks, tree
from funcrl.core.arguments import Count, NotNegative, TensorTree, checked
from funcrl.core.printing import remembers, shows_arguments
from funcrl.core.types import Absent, GradientTransformation, Params, Tree
from funcrl.optim.base import zero_count

Schedule: TypeAlias = Callable[[Tensor], Tensor]  # (number of updates done) -> learning rate


@remembers
@checked
def constant(value: NotNegative) -> Schedule:
    """Return the schedule that is always `value`.

    Example:
        >>> import torch, funcrl
        >>> funcrl.optim.constant(0.5)(torch.tensor(3))
        tensor(0.5000, dtype=torch.float64)
    """

    @checked
    def schedule(count: Tensor) -> Tensor:
        return torch.full_like(count, value, dtype=torch.float64)

    return schedule


@remembers
@checked
def linear(initial: NotNegative, final: NotNegative, steps: Count) -> Schedule:
    """Return the schedule from `initial` to `final` on a line of `steps`, then `final`.

    Example:
        >>> import torch, funcrl
        >>> funcrl.optim.linear(1.0, 0.0, steps=4)(torch.tensor(1))
        tensor(0.7500, dtype=torch.float64)
    """

    @checked
    def schedule(count: Tensor) -> Tensor:
        return initial + (final - initial) * _progress(count, steps)

    return schedule


@remembers
@checked
def cosine(initial: NotNegative, final: NotNegative, steps: Count) -> Schedule:
    """Return the schedule from `initial` to `final` on half a cosine, then `final`.

    SGDR without restarts (arXiv:1608.03983).

    Example:
        >>> import torch, funcrl
        >>> funcrl.optim.cosine(1.0, 0.0, steps=4)(torch.tensor(2))
        tensor(0.5000, dtype=torch.float64)
    """

    @checked
    def schedule(count: Tensor) -> Tensor:
        return final + (initial - final) * (1 + torch.cos(math.pi * _progress(count, steps))) / 2

    return schedule


@remembers
@checked
def warmup(steps: Count, then: Schedule) -> Schedule:
    """Return `then`, preceded by `steps` updates that rise on a line to its first value.

    The first update already moves: its rate is `then(0) / (steps + 1)`, not 0.

    Example:
        >>> import torch, funcrl
        >>> schedule = funcrl.optim.warmup(3, then=funcrl.optim.constant(1.0))
        >>> [schedule(torch.tensor(count)).item() for count in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    @checked
    def schedule(count: Tensor) -> Tensor:
        rising = then(torch.zeros_like(count)) * _progress(count + 1, steps + 1)
        return torch.where(count < steps, rising, then((count - steps).clamp(min=0)))

    return schedule


def _progress(count: Tensor, steps: int) -> Tensor:
    return (count.to(torch.float64) / steps).clamp(max=1.0)


LearningRate: TypeAlias = NotNegative | Schedule  # a number, or one for each update


class ScaleByLearningRateState(NamedTuple):
    """The number of updates done, and the learning rate of the next ones."""

    num_updates: Tensor  # [] int64
    learning_rate: Tensor  # [] float64, as a 0-d tensor it widens no parameter


class ScaleByScheduleState(NamedTuple):
    """The number of updates done, and the rate of the last one; before any, of the first.

    The rate is here to be reported: an update reads the number alone, and calls its schedule.
    """

    num_updates: Tensor  # [] int64
    learning_rate: Tensor  # [] float64


@shows_arguments
@checked
def scale_by_learning_rate(learning_rate: LearningRate) -> GradientTransformation:
    """Return the transformation `-learning_rate * g`.

    A number is put into the state, as a 0-d tensor, and read there: `with_learning_rate` replaces
    it without a recompilation, and a state that is restored brings its own. A schedule is called at
    each update with the number of updates done before it: a state that is restored follows the
    schedule of the optimizer that it is given to, from its first update on.

    Args:
        learning_rate: a number, or a schedule: a function of the number of updates done.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.scale_by_learning_rate(0.5)
        >>> tx.update({"w": torch.ones(1)}, tx.init({"w": torch.ones(1)}), {})[0]
        {'w': tensor([-0.5000])}
    """
    if callable(learning_rate):
        return _scale_by_schedule(learning_rate)

    @checked
    def init(params: Params) -> ScaleByLearningRateState:
        none_yet = zero_count(params)
        rate = torch.full_like(none_yet, learning_rate, dtype=torch.float64)
        return ScaleByLearningRateState(none_yet, rate)

    @checked
    def update(
        grads: TensorTree, state: ScaleByLearningRateState, params: Params
    ) -> tuple[Tree, ScaleByLearningRateState]:
        del params
        updates = tree.scale(grads, -state.learning_rate)
        return updates, state._replace(num_updates=state.num_updates + 1)

    return GradientTransformation(init, update)


@checked
def current_learning_rate(opt_state: TensorTree) -> Tensor | Absent:
    """Return the learning rate of the last update, or of the first one before any.

    A rate that `with_learning_rate` has put there is returned from then on. Of several optimizers
    it is the first one's, and `()` where no part of them is a `scale_by_learning_rate`.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.adamw(1e-3)
        >>> funcrl.optim.current_learning_rate(tx.init({"w": torch.zeros(1)}))
        tensor(0.0010, dtype=torch.float64)
    """
    nodes = optree.tree_leaves(opt_state, is_leaf=_holds_rate)
    rates = [node.learning_rate for node in nodes if _holds_rate(node)]
    return rates[0] if rates else ()


@checked
def with_learning_rate(opt_state: TensorTree, learning_rate: float | Tensor) -> Tree:
    """Return an optimizer's state with another learning rate, where that is a number.

    It is for a rate that changes while a compiled step runs, which it does not compile again, and
    for a restored state that shall go on with another rate than it was saved with.

    Args:
        opt_state: the state, or any tree that holds it, such as a `TrainState`. Of several
            optimizers with a number each, give it the part that belongs to one.
        learning_rate: of all further updates.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.sgd(0.5)
        >>> state = funcrl.optim.with_learning_rate(tx.init({"w": torch.ones(1)}), 0.25)
        >>> tx.update({"w": torch.ones(1)}, state, {})[0]
        {'w': tensor([-0.2500])}
    """
    rate = float(learning_rate)
    checks.check_range("with_learning_rate", "learning_rate", rate, 0.0, float("inf"))
    nodes = optree.tree_leaves(opt_state, is_leaf=_holds_rate)
    numbers = sum(isinstance(node, ScaleByLearningRateState) for node in nodes)
    if numbers != 1:
        schedules = sum(isinstance(node, ScaleByScheduleState) for node in nodes)
        raise ValueError(
            f"with_learning_rate expects the state of one optimizer whose learning rate is a "
            f"number, got {numbers}, and {schedules} of schedules, which no state changes."
        )

    def replaced(node: Any) -> Any:
        if not isinstance(node, ScaleByLearningRateState):
            return node
        return node._replace(learning_rate=torch.full_like(node.learning_rate, rate))

    return optree.tree_map(replaced, opt_state, is_leaf=_holds_rate)


def _scale_by_schedule(schedule: Schedule) -> GradientTransformation:
    def init(params: Params) -> ScaleByScheduleState:
        none_yet = zero_count(params)
        return ScaleByScheduleState(none_yet, _as_rate(schedule(none_yet), none_yet))

    def update(
        grads: TensorTree, state: ScaleByScheduleState, params: Params
    ) -> tuple[Tree, ScaleByScheduleState]:
        del params
        rate = _as_rate(schedule(state.num_updates), state.num_updates)
        return tree.scale(grads, -rate), ScaleByScheduleState(state.num_updates + 1, rate)

    return GradientTransformation(init, update)


def _holds_rate(node: Any) -> bool:
    return isinstance(node, ScaleByLearningRateState | ScaleByScheduleState)


def _as_rate(value: Tensor | float, like: Tensor) -> Tensor:
    """Return a schedule's value as a 0-d float64 tensor, also where it gave a Python number."""
    rate = torch.as_tensor(value, dtype=torch.float64, device=like.device)
    if rate.ndim:
        raise ValueError(
            f"scale_by_learning_rate expects learning_rate to return one number, got a tensor of "
            f"shape {list(rate.shape)}."
        )
    return rate
