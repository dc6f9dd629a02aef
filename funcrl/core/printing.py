"""Text for people: values in one line, and what others wrote made safe to print on a terminal."""

import functools
import inspect
import logging
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ParamSpec, TextIO, TypeAlias, TypeVar

import optree
import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


def of_fields(value: Any) -> str:
    """Return a NamedTuple as its fields, each as `summary`; an absent one is left out."""
    given = value._asdict().items()
    shown = ", ".join(f"{name}={summary(field)}" for name, field in given if not _is_absent(field))
    return f"{type(value).__name__}({shown})"


def _is_absent(field: Any) -> bool:
    return isinstance(field, tuple) and not field


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


def _as_call(name: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> str:
    """Return the call of a function that its arguments make."""
    parameters = signature.parameters.values()
    spread = [each.name for each in parameters if each.kind is each.VAR_POSITIONAL]
    shown = [
        ", ".join(map(repr, value)) if argument in spread else
        described(value) if callable(value) else f"{argument}={value!r}"
        for argument, value in arguments.items()
        if value is not None
    ]  # fmt: skip
    return f"{name}({', '.join(shown)})"


def shows_arguments(factory: Callable[P, R]) -> Callable[P, R]:
    """Return the factory of transformations that are shown as the call that made them.

    `repr(adamw(1e-3))` is `adamw(learning_rate=0.001)`.
    """
    signature = inspect.signature(factory)

    @functools.wraps(factory)
    def make(*args: P.args, **kwargs: P.kwargs) -> R:
        made: Any = factory(*args, **kwargs)
        given = signature.bind(*args, **kwargs).arguments
        made.update.__qualname__ = _as_call(factory.__name__, signature, given)
        return made

    return make


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
        vars(made).update(bound.arguments)
        made.__qualname__ = _as_call(factory.__name__, signature, bound.arguments)
        return made

    return make


Note: TypeAlias = Callable[[str], None]  # is told a line of text

# Control characters but newline and tab, which drive a terminal; bidirectional overrides and
# isolates, which show text in another order; and lone surrogates, which cannot be encoded.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(text: str) -> str:
    """Return text in which each character that could drive a terminal is a Python escape.

    Everything that came from a model, a task or a file may hold such characters.
    """
    return _UNSAFE.sub(lambda found: repr(found[0])[1:-1], text)


def escaped(text: str, keep: str = "") -> str:
    """Return text in which each invisible character is a Python escape, but for those in `keep`."""
    return "".join(c if c.isprintable() or c in keep else repr(c)[1:-1] for c in text)


def print_safely(text: str, file: TextIO | None = None, end: str = "\n") -> None:
    """Print a text as `printable`, to standard output when no file is given."""
    print(printable(text), file=file, flush=True, end=end)


def warn_safely(text: str, stacklevel: int = 3) -> None:
    """Warn with a text as `printable`; a `stacklevel` of 2 names the line of the caller."""
    warnings.warn(printable(text), stacklevel=stacklevel)


@contextmanager
def safe_warnings(file: TextIO) -> Iterator[None]:
    """Print Python's warnings to `file` as `printable`: they may quote text of any origin."""
    logger, handler = logging.getLogger("py.warnings"), logging.StreamHandler(file)
    handler.setFormatter(_SafeFormatter())
    passes_on = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        logger.propagate = passes_on
        logger.removeHandler(handler)


class _SafeFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
