"""Whether an optimizer writes into what it is given, which a pure function never does."""

from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import TorchDispatchMode

from funcrl.core import tree
from funcrl.core.types import GradientTransformation, Params, Tree

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

    Args:
        function: for errors.
        optimizer: whose `update` to check.
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
