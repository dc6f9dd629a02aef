"""Short texts of values: of trees of tensors, and of functions that a factory made."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import optree
import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def of_fields(value: Any) -> str:
    """Return a NamedTuple as its fields, each as `summary`."""
    shown = ", ".join(f"{name}={summary(field)}" for name, field in value._asdict().items())
    return f"{type(value).__name__}({shown})"


def summary(value: Any) -> str:
    """Return a tensor as its dtype, shape and device, and a tree as the numbers in it.

    A tensor without dimensions is shown as it is.
    """
    if isinstance(value, Tensor):
        if not value.ndim:
            return repr(value)
        place = "" if value.device.type == "cpu" else f" on {value.device}"
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}{place}"
    leaves = [leaf for leaf in optree.tree_leaves(value) if isinstance(leaf, Tensor)]
    if not leaves:
        return repr(value) if len(repr(value)) <= 80 else f"{type(value).__name__} of {len(value)}"
    return f"{len(leaves)} tensors of {sum(leaf.numel() for leaf in leaves):,} numbers"


def described(value: Any) -> str:
    """Return a function as its name, with its arguments if a factory that remembers made it."""
    if isinstance(value, functools.partial):
        given = [*map(described, value.args)]
        given += [f"{name}={described(each)}" for name, each in value.keywords.items()]
        return f"{described(value.func)}({', '.join(given)})"
    return getattr(value, "__qualname__", None) or repr(value)


def remembers(factory: Callable[P, R]) -> Callable[P, R]:
    """Return the factory of functions that have their arguments as attributes and in their name.

    `clipped(0.1).low` is 0.1, and its `__qualname__` is `clipped(low=0.1, high=0.2)`.
    """
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        made: Any = factory(*args, **kwargs)
        if torch.compiler.is_compiling():
            return made
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        shown = [
            described(value) if callable(value) else f"{name}={value!r}"
            for name, value in bound.arguments.items()
            if value is not None
        ]
        vars(made).update(bound.arguments)
        made.__qualname__ = f"{factory.__name__}({', '.join(shown)})"
        return made

    return make
