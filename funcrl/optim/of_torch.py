"""Optimizers of torch, and its schedules, as transformations."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode

from funcrl.core import tree
from funcrl.core.arguments import TensorTree, checked
from funcrl.core.printing import shows_arguments
from funcrl.core.types import GradientTransformation, Params, Tree
from funcrl.optim.base import zero_count
from funcrl.optim.schedules import ScaleByScheduleState

MakeFn = Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer]
ScheduleFn = Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
Group = dict[str, Any]  # a parameter group's options


class FromTorchState(NamedTuple):
    """The state of an optimizer of torch."""

    rate: ScaleByScheduleState  # the updates done, and the learning rate of the last one
    slots: tuple[dict[str, Tensor], ...]  # of each leaf, by torch's names; not read at first


@shows_arguments
@checked
def from_torch(make: MakeFn, schedule: ScheduleFn | None = None) -> GradientTransformation:
    """Return an optimizer of torch, or in its form, as a transformation.

    Each update makes it anew over copies of the parameters, gives it its state, and takes what its
    `step` changes: slower than funcrl's own by these copies, and for a step that is not compiled.

    Args:
        make: from parameters to their optimizer, such as `partial(torch.optim.NAdam, lr=1e-3)`.
        schedule: from the optimizer to its schedule, such as
            `lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 10, 100)` of transformers.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.from_torch(lambda params: torch.optim.SGD(params, lr=0.5))
        >>> params = {"w": torch.zeros(2)}
        >>> tx.update({"w": torch.tensor([1.0, 2.0])}, tx.init(params), params)[0]
        {'w': tensor([-0.5000, -1.0000])}
    """
    known: list[list[Group]] = []  # the groups of each update, a function of its number
    more: list[Iterator[list[Group]]] = []

    def groups_at(count: int, num_leaves: int) -> list[Group]:
        while count >= len(known):
            if not more:
                assert schedule is not None
                more.append(_scheduled(make, schedule, num_leaves))
            known.append(next(more[0]))
        return known[count]

    @checked
    def init(params: Params) -> FromTorchState:
        leaves = tree.leaves(params)
        copies = [nn.Parameter(leaf.detach().clone()) for leaf in leaves]
        optimizer = _optimizer(make, copies)
        _step(optimizer, copies, [torch.zeros_like(leaf) for leaf in copies])
        slots = tuple(
            {name: torch.zeros_like(slot) for name, slot in each.items()}
            for each in _slots(optimizer, copies)
        )
        groups = optimizer.param_groups if schedule is None else groups_at(0, len(leaves))
        rate = float(groups[0]["lr"])
        return FromTorchState(_with_rate(zero_count(params), rate), slots)

    @checked
    def update(
        grads: TensorTree, state: FromTorchState, params: Params
    ) -> tuple[Tree, FromTorchState]:
        if get_proxy_mode() is not None:
            raise ValueError(
                "from_torch expects a step that is neither traced nor compiled (--no-compile), "
                "since torch's optimizers keep numbers in Python; funcrl.optim has adamw, sgd and "
                "muon that can be."
            )
        leaves, unflatten = tree.flatten(params)
        copies = [nn.Parameter(leaf.detach().clone()) for leaf in leaves]
        optimizer, count = _optimizer(make, copies), int(state.rate.num_updates)
        if count:  # torch makes the state of the first update itself
            for copy, slots in zip(copies, state.slots, strict=True):
                optimizer.state[copy] = {name: slot.clone() for name, slot in slots.items()}
        if schedule is not None:
            groups = groups_at(count, len(leaves))
            for group, now in zip(optimizer.param_groups, groups, strict=True):
                group.update(now)
        rate = float(optimizer.param_groups[0]["lr"])
        _step(optimizer, copies, [leaf.detach().clone() for leaf in tree.leaves(grads)])
        updates = [
            (copy.detach() - leaf).to(grad.dtype)
            for copy, leaf, grad in zip(copies, leaves, tree.leaves(grads), strict=True)
        ]
        new = FromTorchState(
            _with_rate(state.rate.num_updates + 1, rate), tuple(_slots(optimizer, copies))
        )
        return unflatten(updates), new

    return GradientTransformation(init, update)


@contextmanager
def _plain_defaults(device: torch.device) -> Iterator[None]:
    """Let what torch's optimizers make be where the parameters are, whatever torch's defaults."""
    before = torch.get_default_dtype()
    try:
        if before != torch.float32:
            torch.set_default_dtype(torch.float32)
        with torch.device(device):
            yield
    finally:
        if before != torch.float32:
            torch.set_default_dtype(before)


def _with_rate(count: Tensor, rate: float) -> ScaleByScheduleState:
    return ScaleByScheduleState(count, torch.tensor(rate, dtype=torch.float64, device=count.device))


def _optimizer(make: MakeFn, copies: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    with _plain_defaults(copies[0].device):
        optimizer: Any = make(copies)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"from_torch expects make to return a torch.optim.Optimizer of the parameters that it "
            f"is given, got {type(optimizer).__name__}."
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "from_torch expects an optimizer that needs no closure, which would draw again, got "
            "LBFGS."
        )
    return optimizer


def _step(
    optimizer: torch.optim.Optimizer, copies: Sequence[nn.Parameter], grads: Sequence[Tensor]
) -> None:
    for copy, grad in zip(copies, grads, strict=True):
        copy.grad = grad.to(copy.dtype)
    with _plain_defaults(copies[0].device):
        optimizer.step()


def _slots(
    optimizer: torch.optim.Optimizer, copies: Sequence[nn.Parameter]
) -> list[dict[str, Tensor]]:
    """Return the state of each parameter, by the names that torch's optimizer has for it."""
    found = []
    for copy in copies:
        slots = {name: slot for name, slot in optimizer.state[copy].items() if slot is not None}
        for name, slot in slots.items():
            if not isinstance(slot, Tensor):
                raise ValueError(
                    f"from_torch expects an optimizer whose state is tensors, got {name} of "
                    f"{type(slot).__name__} from {type(optimizer).__name__}."
                )
        found.append({name: slots[name].detach() for name in sorted(slots)})
    return found


def _scheduled(make: MakeFn, schedule: ScheduleFn, num_leaves: int) -> Iterator[list[Group]]:
    """Yield the groups' options, learning rates among them, of one update after another."""
    copies = [nn.Parameter(torch.zeros(1, 1, device="cpu")) for _ in range(num_leaves)]
    optimizer = _optimizer(make, copies)
    with _plain_defaults(copies[0].device):
        scheduler = schedule(optimizer)
    # Torch warns of a schedule whose optimizer has made no step.
    _step(optimizer, copies, [torch.zeros(1, 1, device="cpu") for _ in copies])
    while True:
        yield [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]
        scheduler.step()
