"""How tyro reads the fields of a configuration: their texts for help, and their numbers."""

import ast
import inspect
import textwrap
from dataclasses import fields, is_dataclass
from functools import cache, partial
from itertools import pairwise
from typing import Any, get_origin, get_type_hints

from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    StructConstructorSpec,
    StructFieldSpec,
    StructTypeInfo,
)

from funcrl.config.plain import read_integer, read_number
from funcrl.core.files import brief

REGISTRY = ConstructorRegistry()


@REGISTRY.struct_rule
def _struct_rule(info: StructTypeInfo) -> StructConstructorSpec | None:
    """Return a configuration's options, each with its text as one line for tyro to wrap.

    tyro's own rule for dataclasses keeps the line breaks of the source.
    """
    kind, has_source = info.type, info.type.__module__.startswith("funcrl.")
    if not (is_dataclass(kind) and has_source and isinstance(info.default, kind)):
        return None
    kinds = get_type_hints(kind, include_extras=True)
    texts = cache(partial(texts_of, kind))  # for help alone: a source takes milliseconds to find

    def text(name: str) -> str | None:
        return texts().get(name)  # None for a section, which its class describes

    options = [
        StructFieldSpec(
            name=each.name,
            type=kinds[each.name],
            default=getattr(info.default, each.name),
            helptext=partial(text, each.name),
        )
        for each in fields(kind)
    ]
    return StructConstructorSpec(kind, tuple(options))


def texts_of(kind: type[Any]) -> dict[str, str]:
    """Return the text below each field of a dataclass, its bases' among them, as one line."""
    bases = [base for base in reversed(kind.__mro__) if is_dataclass(base)]
    definitions = [ast.parse(textwrap.dedent(inspect.getsource(base))).body[0] for base in bases]
    return {
        ast.unparse(field.target): " ".join(text.value.value.split())
        for definition in definitions
        if isinstance(definition, ast.ClassDef)
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }


@REGISTRY.primitive_rule
def _primitive_rule(kind: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Numbers are written as YAML has them: Python's own may have other digits and underscores.

    A dict is pairs, also if it has a default.
    """
    readers: dict[Any, Any] = {int: read_integer, float: read_number}
    if get_origin(kind.type) is dict:
        return PrimitiveConstructorSpec(
            nargs="*",
            metavar="[NAME FLOAT ...]",
            instance_from_str=_read_pairs,
            is_instance=lambda value: isinstance(value, dict),
            str_from_instance=lambda value: [str(part) for pair in value.items() for part in pair],
        )
    if kind.type not in readers:
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=kind.type.__name__.upper(),
        instance_from_str=lambda texts: readers[kind.type](texts[0]),
        is_instance=lambda value: isinstance(
            value, int | float if kind.type is float else kind.type
        ),
        str_from_instance=lambda value: [str(value)],
    )


def _read_pairs(texts: list[str]) -> dict[str, float]:
    if len(texts) % 2:
        raise ValueError(f"expects pairs of a name and a number, got {brief(' '.join(texts))}.")
    return {name: read_number(text) for name, text in zip(texts[::2], texts[1::2], strict=True)}
