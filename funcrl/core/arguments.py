"""Comparison of arguments with their annotations, by one decorator for all public functions.

A wrong type would otherwise end deep inside torch, or nowhere. An annotation says the bounds of a
number as well (`Count`, `Positive`); shapes, and bounds that depend on other arguments, are for
`funcrl.checks`. What an annotation leaves open (`Any`) is open here, too.
"""

import dataclasses
import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NoReturn,
    ParamSpec,
    Protocol,
    SupportsIndex,
    TypeAlias,
    TypeVar,
)

import optree
import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class Kind(NamedTuple):
    """The values that an annotation allows."""

    words: str  # "a tensor"
    takes: Callable[[Any], bool]
    # (its key, part, kind of the part) of each part of a value.
    parts: Callable[[Any], Iterable[tuple[Any, Any, "Kind"]]] = lambda _: ()
    # Whether a value that is not taken is of the right type, so that the error is a ValueError.
    is_of_type: Callable[[Any], bool] = lambda _: False
    relation: str = ""  # "> 0", in place of the words for a number out of bounds

    def __repr__(self) -> str:  # as `help()` and a notebook's `?` show it in a signature
        return repr(self.words)


def checked(fn: Callable[P, R]) -> Callable[P, R]:
    """Return `fn` that refuses an argument which its annotation does not allow.

    A wrong type is a TypeError, and a wrong value of the right type, such as -1 for a `Count`, a
    ValueError.
    No tensor's values are read, so that a checked function can be traced, vmapped and
    differentiated. torch.compile sees `fn` alone, as it would break its graph at the checks.
    """
    if torch.compiler.is_compiling():
        return fn
    name = fn.__qualname__.replace(".<locals>.", "'s ")
    name = name.removesuffix(".__call__").removesuffix(".__init__")
    code = inspect.unwrap(fn).__code__
    names, rest, options = inspect.getargs(code)
    kinds = {argument: _kind(hint) for argument, hint in fn.__annotations__.items()}
    of_options = _kinds_of_options(fn.__annotations__.get(options)) if options else {}
    kinds |= of_options
    allowed = ", ".join(each for each in kinds if each not in (options, "return"))
    if all(kind is _ANYTHING for argument, kind in kinds.items() if argument != "return"):
        return fn
    places = [(place, kinds.get(place, _ANYTHING)) for place in names[: code.co_argcount]]

    @functools.wraps(fn)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not torch.compiler.is_compiling():
            for (argument, kind), value in zip(places, args, strict=False):
                if not kind.takes(value):
                    _refuse(name, argument, kind, value)
            if len(args) > len(places) and rest in kinds:
                for number, value in enumerate(args[len(places) :]):
                    if not kinds[rest].takes(value):
                        _refuse(name, f"{rest}[{number}]", kinds[rest], value)
            for argument, value in kwargs.items():
                if of_options and argument not in kinds:
                    raise TypeError(f"{name} expects {allowed}, got {argument!r}.")
                if argument in kinds and not kinds[argument].takes(value):
                    _refuse(name, argument, kinds[argument], value)
        return fn(*args, **kwargs)

    return call


def check_fields(config: Any, command: str = "") -> None:
    """Raise for a field of a dataclass that has a value which its annotation does not allow.

    With a command, the error names it, and its option, in place of the class and the field. A
    string in place of a path becomes one.
    """
    for field in dataclasses.fields(config):
        hint: Any = field.type
        kind, value = _kind(hint), getattr(config, field.name)
        if isinstance(value, str) and Path in (hint, *typing.get_args(hint)):
            if not value:  # which Path takes for the working directory
                _refuse_empty(command, field.name, config)
            value = Path(value)
            object.__setattr__(config, field.name, value)  # of a frozen dataclass being made
        if not kind.takes(value):
            option = f"--{field.name.replace('_', '-')}" if command else field.name
            _refuse(command or type(config).__name__, option, kind, value)


def _refuse_empty(command: str, name: str, config: Any) -> NoReturn:
    option = f"--{name.replace('_', '-')}" if command else name
    raise ValueError(f"{command or type(config).__name__} expects {option} to be a path, got ''.")


def check_value(function: str, argument: str, hint: Any, value: Any) -> None:
    """Raise for a value that an annotation does not allow, as `checked` does for an argument."""
    kind = _kind(hint)
    if not kind.takes(value):
        _refuse(function, argument, kind, value)


class CheckedFields:
    """A dataclass whose fields are compared with their annotations when it is made."""

    def __post_init__(self) -> None:
        check_fields(self)


def _refuse(function: str, argument: str, kind: Kind, value: Any) -> NoReturn:
    """Raise an error that names the argument, or the part of it that is wrong."""
    for key, part, of_part in kind.parts(value):
        if not of_part.takes(part):
            is_field = isinstance(value, tuple) and isinstance(key, str)
            suffix = f".{key}" if is_field else f"[{key!r}]"
            _refuse(function, argument + suffix, of_part, part)
    of_type = kind.is_of_type(value)
    expected = kind.relation if of_type and kind.relation else f"to be {kind.words}"
    error = ValueError if of_type else TypeError
    wanted = f"{argument} to be {kind.words}"
    advice = "".join(text for words, text in _ADVICE.items() if re.search(rf"{words}\b", wanted))
    raise error(f"{function} expects {argument} {expected}, got {_shown(value)}{advice}.")


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if inspect.isfunction(value):
        return f"the function {value.__name__}"
    if isinstance(value, bool | int | float | str | None) or value in ([], {}, ()):
        return repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
    return type(value).__name__


def _kinds_of_options(hint: Any) -> dict[str, Kind]:
    """Return the kinds of `**options: Unpack[ATypedDict]`."""
    if typing.get_origin(hint) is not typing.Unpack:
        return {}
    (options,) = typing.get_args(hint)
    return {name: _kind(each) for name, each in inspect.get_annotations(options).items()}


@functools.cache
def _kind(hint: Any) -> Kind:
    """Return the kind of an annotation."""
    origin, arguments = typing.get_origin(hint) or hint, typing.get_args(hint)
    if origin is Annotated:
        kinds = [each for each in hint.__metadata__ if isinstance(each, Kind)]
        return kinds[0] if kinds else _kind(arguments[0])  # others' words about a type
    if isinstance(hint, TypeVar) and hint.__constraints__:
        return _union([_kind(each) for each in hint.__constraints__])
    if origin in _SIMPLE:
        return _SIMPLE[origin]
    if origin in (typing.Union, types.UnionType):
        return _union([_kind(each) for each in arguments])
    if origin is Literal:
        words = " or ".join(repr(each) for each in arguments)
        return Kind(
            words,
            lambda value: isinstance(value, Hashable) and value in arguments,
            is_of_type=lambda value: type(value) in map(type, arguments),
        )
    if origin is tuple:
        return _tuple(arguments)
    if origin in _CONTAINERS:
        return _container(origin, arguments)
    if isinstance(origin, type):
        return _class(origin)
    return _ANYTHING  # a type variable, or the name of a type that is not yet defined


def _union(options: Sequence[Kind]) -> Kind:
    return Kind(
        " or ".join(option.words for option in options),
        lambda value: any(option.takes(value) for option in options),
        lambda value: (part for option in options for part in option.parts(value)),
        lambda value: any(option.is_of_type(value) for option in options),
    )


def _whole(
    words: str,
    fits: Callable[[Any], bool],
    parts: Callable[[Any], Iterable[tuple[Any, Any, Kind]]],
) -> Kind:
    """Return the kind of values that fit, and whose parts are each of their own kind."""
    return Kind(
        words,
        lambda value: fits(value) and all(kind.takes(part) for _, part, kind in parts(value)),
        lambda value: parts(value) if fits(value) else (),
    )


def _tuple(hints: Sequence[Any]) -> Kind:
    if hints[1:] == (...,):
        each = _kind(hints[0])
        return _whole(
            f"a tuple, each {each.words}",
            lambda value: isinstance(value, tuple),
            lambda value: ((index, part, each) for index, part in enumerate(value)),
        )
    kinds = [_kind(hint) for hint in hints]
    inner = ", ".join(kind.words for kind in kinds)
    return _whole(
        f"a {'pair' if len(kinds) == 2 else f'tuple of {len(kinds)}'} ({inner})" if kinds else "()",
        lambda value: (
            isinstance(value, tuple | list if kinds else tuple) and len(value) == len(kinds)
        ),
        lambda value: zip(range(len(kinds)), value, kinds, strict=True),
    )


def _container(origin: type, hints: Sequence[Any]) -> Kind:
    """Return the kind of a list, whose elements may be too many to check, or of a mapping."""
    words = _CONTAINERS[origin]
    if not issubclass(origin, Mapping):
        return Kind(words, lambda value: isinstance(value, origin) and not isinstance(value, str))
    item = hints[1] if hints else Any
    each = _LEAF if item is Tensor else _kind(item)
    words += " of tensors" if item is Tensor else ""
    return _whole(
        words,
        lambda value: isinstance(value, origin),
        lambda value: ((key, part, each) for key, part in value.items()),
    )


def _class(kind: type) -> Kind:
    words = f"{'an' if kind.__name__[0] in 'AEIOU' else 'a'} {kind.__name__}"
    if Protocol in kind.__bases__:
        members = vars(kind).keys() | inspect.get_annotations(kind).keys()
        names = sorted(name for name in members if not name.startswith("_"))
        # Any object with the attributes will do, but not a class, whose methods lack their self.
        return Kind(
            f"{words} (any object with {', '.join(names)})",
            lambda value: not isinstance(value, type) and all(hasattr(value, n) for n in names),
        )
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    hints = inspect.get_annotations(kind) if is_named_tuple else {}
    fields = [(name, _kind(hint)) for name, hint in hints.items()]
    return _whole(
        words,
        lambda value: isinstance(value, kind),
        lambda value: ((name, getattr(value, name), of_part) for name, of_part in fields),
    )


def _all(tree: Any, kind: Any) -> bool:
    """Return whether each leaf is of the type; None, which has no leaves, is not a tree."""
    return tree is not None and all(isinstance(leaf, kind) for leaf in optree.tree_leaves(tree))


def is_integer(value: Any) -> bool:
    """Return whether a value is an integer; True and False are not."""
    return isinstance(value, int | torch.SymInt | numbers.Integral) and not isinstance(value, bool)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, infinity and NaN included."""
    number = isinstance(value, float | int | torch.SymFloat | torch.SymInt | numbers.Real)
    return number and not isinstance(value, bool)


def integer(words: str, holds: Callable[[int], bool] = lambda _: True) -> Kind:
    """Return the kind of integers of 64 bits for which `holds`."""
    return Kind(
        words,
        lambda value: is_integer(value) and -(2**63) <= value < 2**63 and holds(value),
        is_of_type=is_integer,
    )


def number(words: str, holds: Callable[[float], bool], relation: str = "") -> Kind:
    """Return the kind of real numbers for which `holds`."""
    return Kind(
        words,
        lambda value: is_number(value) and holds(value),
        is_of_type=is_number,
        relation=relation,
    )


# What makes a value of a type, for those who gave something else.
_ADVICE = {
    "a TaskLike": "; funcrl.tasks.from_rows makes a task of rows or of a data set, and "
    "funcrl.tasks.load one of a name",
    "an AlgorithmConfig": "; funcrl.config.AlgorithmConfig(name='dapo') is one",
    "an OptimizerConfig": "; funcrl.config.OptimizerConfig(name='adamw') is one",
    "a CompileConfig": "; funcrl.config.CompileConfig() is one",
    "an EvalConfig": "; funcrl.config.EvalConfig(run=folder) is one",
    "an Algorithm": "; funcrl.grpo() and funcrl.dapo() are two",
    "a GradientTransformation": "; funcrl.optim.adamw(1e-6) is one",
    "params to be a dict of tensors": "; funcrl.init_params(model, seed=0) draws them, and "
    "funcrl.load_params(name) loads those of weights",
    "a Module": "; funcrl.load_params(name) returns the model and the parameters of weights",
}
_ANYTHING = Kind("anything", lambda _: True)
# A leaf of a tree of tensors; optim.masked puts the empty tuple in place of a leaf not selected.
_LEAF = Kind(
    "a tensor", lambda value: isinstance(value, Tensor) or (type(value) is tuple and not value)
)
_SIMPLE: dict[Any, Kind] = {
    Any: _ANYTHING,
    object: _ANYTHING,
    Tensor: Kind("a tensor", lambda value: isinstance(value, Tensor)),
    Callable: Kind("a function", callable),
    float: number("a number", lambda value: value == value),
    int: integer("an integer of 64 bits"),
    SupportsIndex: Kind(
        "an integer",
        lambda value: (
            not value.ndim and not value.is_floating_point()
            if isinstance(value, Tensor)
            else hasattr(value, "__index__") and not isinstance(value, bool | type)
        ),
    ),
    str: Kind("a string", lambda value: isinstance(value, str)),
    bool: Kind("True or False", lambda value: isinstance(value, bool)),
    type: Kind("a class", lambda value: isinstance(value, type)),
    types.NoneType: Kind("None", lambda value: value is None),
}
# Annotations for numbers within bounds. NaN is in none of them. They hold for the items of a tuple
# and of a mapping; those of a list are not looked at, which may be long.
Count: TypeAlias = Annotated[int, integer("a 64-bit integer above 0", lambda value: value > 0)]
CountOrAll: TypeAlias = Count | Literal["all"]
Natural: TypeAlias = Annotated[
    int, integer("a 64-bit integer of at least 0", lambda value: value >= 0)
]
Positive: TypeAlias = Annotated[
    float, number("a number above 0", lambda value: value > 0, relation="> 0")
]
NotNegative: TypeAlias = Annotated[
    float, number("a number of at least 0", lambda value: value >= 0, relation=">= 0")
]
TopP: TypeAlias = Annotated[
    float, number("a number above 0 and at most 1", lambda value: 0 < value <= 1)
]
Fraction: TypeAlias = Annotated[
    float, number("a number from 0 to 1", lambda value: 0 <= value <= 1)
]
# How slowly a running mean forgets.
Decay: TypeAlias = Annotated[
    float, number("a number from 0 to below 1", lambda value: 0 <= value < 1)
]
Finite: TypeAlias = Annotated[float, number("a finite number", lambda value: abs(value) < math.inf)]
FinitePositive: TypeAlias = Annotated[
    float, number("a finite number above 0", lambda value: 0 < value < math.inf)
]
FiniteNotNegative: TypeAlias = Annotated[
    float, number("a finite number of at least 0", lambda value: 0 <= value < math.inf)
]
# Annotations for kinds of values that are no Python types.
TensorTree: TypeAlias = Annotated[Any, Kind("a tree of tensors", lambda value: _all(value, Tensor))]
NumberTree: TypeAlias = Annotated[
    Any, Kind("a tree of tensors or numbers", lambda value: _all(value, Tensor | float | int))
]
Mask: TypeAlias = Annotated[
    Any,
    Kind(
        "a function of a path and a leaf, or a tree of True and False",
        lambda value: callable(value) or _all(value, bool),
    ),
]
_CONTAINERS: dict[type, str] = {
    list: "a list",
    Sequence: "a sequence",
    Collection: "a collection",
    dict: "a dict",
    Mapping: "a mapping",
}
