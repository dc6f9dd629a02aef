"""How values are written on the command line: as tyro reads annotations, numbers as YAML does."""

from collections.abc import Sequence
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from funcrl.cli.suggest import close, did_you_mean
from funcrl.config.plain import read_integer, read_number
from funcrl.core.files import brief

_REGISTRY = ConstructorRegistry()


@_REGISTRY.primitive_rule
def _number_rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if kind.type not in (int, float):
        return None
    read = read_integer if kind.type is int else read_number
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar="INT" if kind.type is int else "FLOAT",
        instance_from_str=lambda texts: read(texts[0]),
        is_instance=lambda value: isinstance(value, int if kind.type is int else int | float),
        str_from_instance=lambda value: [str(value)],
    )


def takes_many(kind: Any) -> bool:
    """Return whether any number of texts make a value of this annotation."""
    return get_origin(kind) in (tuple, dict)


def read_value(kind: Any, texts: Sequence[str]) -> Any:
    """Return the value of an annotation that texts say; errors begin with "expects".

    The parts of a tuple and of a dict, and what may be None, are read one by one: an error is of
    the part that is wrong.
    """
    inner = [each for each in get_args(kind) if each not in (type(None), ...)]
    if get_origin(kind) is tuple:
        return tuple(read_value(inner[0], [text]) for text in texts)
    if get_origin(kind) is dict:
        if len(texts) % 2:
            raise ValueError(f"expects pairs of a name and a number, got {brief(' '.join(texts))}.")
        pairs = zip(texts[::2], texts[1::2], strict=True)
        return {name: read_value(inner[1], [text]) for name, text in pairs}
    if type(None) in get_args(kind) and texts[0] == "None":
        return None
    if get_origin(kind) in (Union, UnionType):
        return _read_one_of(inner, texts)
    if kind is Path and not texts[0]:  # which Path takes for the working directory
        raise ValueError("expects a path, got ''.")
    with _REGISTRY:
        spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kind, set()))
    if not isinstance(spec, PrimitiveConstructorSpec):
        raise TypeError(f"read_value expects the annotation of an option, got {kind}.")
    if spec.choices is not None and texts[0] not in spec.choices:
        meant = did_you_mean(close(texts[0], spec.choices))
        raise ValueError(f"expects {' or '.join(spec.choices)}, got {brief(texts[0])}{meant}")
    return spec.instance_from_str(list(texts))


def _read_one_of(kinds: Sequence[Any], texts: Sequence[str]) -> Any:
    """Return the value of a union of names and another annotation, or of that one alone."""
    names = [name for kind in kinds if get_origin(kind) is Literal for name in get_args(kind)]
    others = [kind for kind in kinds if get_origin(kind) is not Literal]
    if not others:
        return read_value(kinds[0], texts)
    if texts[0] in names:
        return texts[0]
    try:
        return read_value(others[0], texts)
    except ValueError as error:
        if not names:
            raise
        expected = str(error).removeprefix("expects ")
        raise ValueError(f"expects {' or '.join(names)} or {expected}") from None
