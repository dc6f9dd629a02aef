"""Combination of transformations: chains, masks, guards against NaN and writes, the update."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from funcrl.core import numerics, tree
from funcrl.core.arguments import Mask, NotNegative, Positive, TensorTree, checked
from funcrl.core.printing import shows_arguments
from funcrl.core.types import GradientTransformation, Params, Tree
from funcrl.parallel import Axis, all_gather, global_norm
from funcrl.parallel.mesh import ALONE


class EmptyState(NamedTuple):
    """The state of a transformation that has none."""


class MaskedState(NamedTuple):
    """The inner state, over the selected leaves alone."""

    inner: Any


class SkipNonfiniteState(NamedTuple):
    """The inner state, and how many updates were skipped."""

    inner: Any
    num_skipped: Tensor  # [] int64


@checked
def stateless(update: Callable[[Tree, Params], Tree]) -> GradientTransformation:
    """Return a transformation without state from `(grads, params) -> updates`.

    Example:
        >>> import torch
        >>> from funcrl import optim, tree
        >>> double = optim.stateless(lambda grads, params: tree.scale(grads, 2.0))
        >>> double.update({"w": torch.ones(1)}, double.init({}), {})[0]
        {'w': tensor([2.])}
    """

    @checked
    def init(params: Params) -> EmptyState:
        del params
        return EmptyState()

    @checked
    def update_fn(grads: TensorTree, state: EmptyState, params: Params) -> tuple[Tree, EmptyState]:
        return update(grads, params), state

    return GradientTransformation(init, update_fn)


@shows_arguments
@checked
def chain(*transformations: GradientTransformation) -> GradientTransformation:
    """Return the transformation that passes updates through the given ones, in order.

    Its state is the tuple of their states. Each one's updates must have the gradients' shapes.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.chain(funcrl.optim.clip_by_global_norm(1.0), funcrl.optim.sgd(0.5))
        >>> params = {"w": torch.zeros(2)}
        >>> tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init(params), params)[0]
        {'w': tensor([-0.3000, -0.4000])}
    """

    @checked
    def init(params: Params) -> tuple[Any, ...]:
        return tuple(tx.init(params) for tx in transformations)

    @checked
    def update(grads: TensorTree, state: tuple[Any, ...], params: Params) -> tuple[Tree, Any]:
        new_state = []
        updates = grads
        for index, (tx, tx_state) in enumerate(zip(transformations, state, strict=True)):
            updates, tx_state = tx.update(updates, tx_state, params)
            what = f"the updates of transformation {index}"
            tree.check_same_shapes("chain", what, updates, "the gradients", grads)
            new_state.append(tx_state)
        return updates, tuple(new_state)

    return GradientTransformation(init, update)


@shows_arguments
@checked
def masked(inner: GradientTransformation, mask: Mask) -> GradientTransformation:
    """Return `inner` restricted to the leaves that the mask selects; others pass unchanged.

    Unchanged gradients are no updates: another `masked` transformation must take the rest, or
    `freeze`. State is kept for the selected leaves alone.

    Args:
        inner: the transformation.
        mask: a tree of bools like the parameters, or `(path, leaf) -> bool`.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.masked(funcrl.optim.sgd(0.5), lambda path, leaf: leaf.ndim == 2)
        >>> params = {"b": torch.zeros(1), "w": torch.zeros(1, 1)}
        >>> tx.update({"b": torch.ones(1), "w": torch.ones(1, 1)}, tx.init(params), params)[0]
        {'b': tensor([1.]), 'w': tensor([[-0.5000]])}
    """

    @checked
    def init(params: Params) -> MaskedState:
        return MaskedState(inner.init(_selected(params, _resolve(mask, params))))

    @checked
    def update(grads: TensorTree, state: MaskedState, params: Params) -> tuple[Tree, MaskedState]:
        tree.check_same_structure("masked", params, grads)
        keep = _resolve(mask, params)
        selected = _selected(grads, keep)
        updates, inner_state = inner.update(selected, state.inner, _selected(params, keep))
        tree.check_same_shapes("masked", "inner's updates", updates, "the gradients", selected)
        changed = iter(tree.leaves(updates))
        values, unflatten = tree.flatten(grads)
        merged = [next(changed) if kept else leaf for kept, leaf in zip(keep, values, strict=True)]
        return unflatten(merged), MaskedState(inner_state)

    return GradientTransformation(init, update)


@shows_arguments
@checked
def skip_nonfinite(
    inner: GradientTransformation, axis: Axis = ALONE.shard
) -> GradientTransformation:
    """Return `inner` that skips, and counts, updates that are not finite.

    An update is skipped where a number of the gradients, the updates or the inner state is not
    finite, or the float32 sum of a leaf overflows. The choice is made by `where` on the device: no
    synchronisation, and it can be traced.

    Args:
        inner: the transformation.
        axis: of ranks that hold rows of each leaf: all skip what is not finite on one.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.skip_nonfinite(funcrl.optim.sgd(0.5))
        >>> params = {"w": torch.zeros(1)}
        >>> updates, state = tx.update({"w": torch.tensor([torch.nan])}, tx.init(params), params)
        >>> updates, state.num_skipped
        ({'w': tensor([0.])}, tensor(1))
    """

    @checked
    def init(params: Params) -> SkipNonfiniteState:
        return SkipNonfiniteState(inner.init(params), zero_count(params))

    @checked
    def update(
        grads: TensorTree, state: SkipNonfiniteState, params: Params
    ) -> tuple[Tree, SkipNonfiniteState]:
        updates, inner_state = inner.update(grads, state.inner, params)
        name = "skip_nonfinite"
        tree.check_tensors(name, "inner's updates", updates)
        tree.check_tensors(name, "inner's state", inner_state)
        # `where` would broadcast leaves of other shapes.
        tree.check_same_shapes(name, "inner's updates", updates, "the gradients", grads)
        tree.check_same_shapes(name, "inner's new state", inner_state, "its last", state.inner)
        # The result is checked as well: the square of a finite gradient may overflow in a moment.
        finite = _all_finite((grads, updates, inner_state))
        if axis.size > 1:
            finite = all_gather(finite[None], axis).all()
        new, unflatten = tree.flatten((updates, inner_state))
        # The list alone holds the new leaves, so that each is freed as soon as it is replaced.
        del updates, inner_state
        old = [torch.zeros((), device=leaf.device, dtype=leaf.dtype) for leaf in tree.leaves(grads)]
        for index, before in enumerate([*old, *tree.leaves(state.inner)]):
            new[index] = torch.where(finite, new[index], before)
        updates, inner_state = unflatten(new)
        return updates, SkipNonfiniteState(inner_state, state.num_skipped + ~finite)

    return GradientTransformation(init, update)


@checked
def apply_updates(params: Params, updates: Tree) -> Params:
    """Return `params + updates`, added in the wider dtype and kept in that of the parameters.

    Example:
        >>> import torch, funcrl
        >>> funcrl.optim.apply_updates({"w": torch.ones(1)}, {"w": torch.ones(1)})
        {'w': tensor([2.])}
    """
    tree.check_same_shapes("apply_updates", "updates", updates, "params", params)
    result: Params = tree.map(lambda leaf, step: (leaf + step).to(leaf.dtype), params, updates)
    return result


@shows_arguments
@checked
def clip_by_global_norm(max_norm: Positive, axis: Axis = ALONE.shard) -> GradientTransformation:
    """Return the transformation that scales gradients to a global norm of at most `max_norm`.

        g * min(1, max_norm / |g|)

    Args:
        max_norm: the largest norm.
        axis: of ranks that hold rows of each leaf, such as `mesh.shard`.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.clip_by_global_norm(1.0)
        >>> tx.update({"w": torch.tensor([3.0, 4.0])}, tx.init({}), {})[0]
        {'w': tensor([0.6000, 0.8000])}
    """

    def clip(grads: TensorTree, params: Params) -> Tree:
        del params
        factor = (max_norm / global_norm(grads, axis)).clamp(max=1.0)
        return tree.scale(grads, factor)

    return stateless(clip)


@shows_arguments
@checked
def add_decayed_weights(
    weight_decay: NotNegative, mask: Mask | None = None
) -> GradientTransformation:
    """Return the transformation `g + weight_decay * p`, on the leaves that the mask selects.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.add_decayed_weights(0.1)
        >>> params = {"w": torch.tensor([2.0])}
        >>> tx.update({"w": torch.zeros(1)}, tx.init(params), params)[0]
        {'w': tensor([0.2000])}
    """

    def decay(grads: TensorTree, params: Params) -> Tree:
        tree.check_same_shapes("add_decayed_weights", "gradients", grads, "params", params)
        # The parameter is converted first: one in bf16 must not narrow an update kept in fp32.
        return tree.map(lambda grad, leaf: grad + weight_decay * leaf.to(grad.dtype), grads, params)

    return stateless(decay) if mask is None else masked(stateless(decay), mask)


@shows_arguments
@checked
def freeze(mask: Mask) -> GradientTransformation:
    """Return the transformation that sets the updates of the selected leaves to 0.

    The last link of a chain, to keep some parameters as they are.

    Example:
        >>> import torch, funcrl
        >>> tx = funcrl.optim.chain(
        ...     funcrl.optim.sgd(0.5), funcrl.optim.freeze(lambda path, leaf: path == "b"))
        >>> params = {"b": torch.ones(1), "w": torch.ones(1)}
        >>> tx.update(params, tx.init(params), params)[0]
        {'b': tensor([0.]), 'w': tensor([-0.5000])}
    """
    return masked(stateless(lambda grads, _: tree.zeros_like(grads)), mask)


@checked
def zero_count(params: Params) -> Tensor:
    """Return a 0-d int64 zero on the device of the parameters, which must have a leaf.

    Example:
        >>> import torch, funcrl
        >>> funcrl.optim.zero_count({"w": torch.ones(2)})
        tensor(0)
    """
    tensors = tree.leaves(params)
    if not tensors:
        raise ValueError("init expects at least one parameter, got none; does a mask select none?")
    return torch.zeros((), dtype=torch.int64, device=tensors[0].device)


def bias_correction(beta: float, num_updates: Tensor) -> Tensor:
    """Return `1 - beta^num_updates` in float64: in fp32 it would lose four digits at first."""
    return 1 - beta ** num_updates.to(torch.float64)


def _all_finite(values: Tree) -> Tensor:
    """Return whether all values are finite, [] bool."""
    # By one sum a leaf, in which NaN and infinity stay: no copy, one kernel.
    floating = [leaf for leaf in tree.leaves(values) if leaf.is_floating_point()]
    sums = [leaf.sum(dtype=numerics.at_least_float32(leaf.dtype)) for leaf in floating]
    return torch.stack(sums).isfinite().all()


def _resolve(mask: Mask, params: Params) -> list[bool]:
    """Return one bool for each leaf of the parameters."""
    if callable(mask):
        return tree.leaves(tree.map_with_path(lambda path, leaf: bool(mask(path, leaf)), params))
    tree.check_same_structure("masked", params, mask)
    return tree.leaves(mask)


def _selected(values: Tree, keep: list[bool]) -> Tree:
    """Return the tree with `()`, a node without leaves, in place of each leaf not kept."""
    leaves, unflatten = tree.flatten(values)
    return unflatten([leaf if kept else () for leaf, kept in zip(leaves, keep, strict=True)])


# Integers of the size of a number, whose sum tells bits apart.
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class _Mark(NamedTuple):
    """How a tensor stood before an update."""

    path: str
    leaf: Tensor
    version: int | None  # the number of writes that torch has counted
    total: Tensor | None  # of the bits of all numbers


def refuse_writes(function: str, optimizer: GradientTransformation) -> GradientTransformation:
    """Return the optimizer with a check that it writes into neither its state nor the parameters.

    A step keeps the old state where it skips an update, and its caller may keep it too. Torch's
    counts of writes are compared in each update. It counts none through `.data`, by fused
    optimizers, or to tensors of inference mode: so the bits of all tensors are summed before and
    after the first update, and in a trace, which has no values, each operation is looked at.
    """
    is_first = True

    def update(grads: Tree, state: Any, params: Params) -> tuple[Tree, Any]:
        nonlocal is_first
        traced = None if get_proxy_mode() is None else _Writes()
        marks = _marks({"state": state, "params": params}, is_first and traced is None)
        with traced or nullcontext():
            result = optimizer.update(grads, state, params)
        written = next((mark for mark in marks if _is_written(mark, traced)), None)
        if written is not None:
            raise ValueError(
                f"{function} expects an optimizer whose update writes into nothing that it is "
                f"given, got a write to {written.path!r}; mul_, and out= do that, where mul "
                f"returns a new tensor."
            )
        is_first = False
        return result

    return optimizer._replace(update=update)


class _Writes(TorchDispatchMode):
    """Remembers the memory that operations write into."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # (torch's own)
        self.memory: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = func._schema.arguments
        named = [*zip(arguments, args, strict=False)]
        named += [(each, kwargs[each.name]) for each in arguments if each.name in kwargs]
        for argument, value in named:
            if argument.alias_info is not None and argument.alias_info.is_write:
                leaves = value if isinstance(value, list | tuple) else [value]
                self.memory |= {_memory(leaf) for leaf in leaves if isinstance(leaf, Tensor)}
        return func(*args, **kwargs)


def _memory(leaf: Tensor) -> int:
    return leaf.untyped_storage()._cdata


def _marks(values: Tree, with_totals: bool) -> list[_Mark]:
    pairs = zip(tree.paths(values), tree.leaves(values), strict=True)
    return [_mark(path, leaf, with_totals) for path, leaf in pairs if isinstance(leaf, Tensor)]


def _mark(path: str, leaf: Tensor, with_total: bool) -> _Mark:
    version = None if leaf.is_inference() else leaf._version
    return _Mark(path, leaf, version, _total(leaf) if with_total else None)


def _total(leaf: Tensor) -> Tensor | None:
    """Return the sum of a tensor's bits; None without values, as under vmap."""
    has_values = type(leaf) in (Tensor, torch.nn.Parameter) and not leaf.is_meta
    if not has_values or is_functorch_wrapped_tensor(leaf) or leaf.element_size() not in _BITS:
        return None
    return leaf.detach().view(_BITS[leaf.element_size()]).sum(dtype=torch.int64)


def _is_written(before: _Mark, traced: _Writes | None) -> bool:
    if traced is not None and _memory(before.leaf) in traced.memory:
        return True
    now = _mark(before.path, before.leaf, before.total is not None)
    if now.version != before.version:
        return True
    if before.total is None or now.total is None:
        return False
    return bool(now.total != before.total)
