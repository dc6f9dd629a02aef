"""Rotary positions in a config.json, where transformers has kept them in several places by now."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from funcrl.weights.metadata import Metadata

# A number that a description may have.
Place: TypeAlias = tuple[Metadata, str]
# Options that change the rotation, with the values under which they do not.
PLAIN_ROPE: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default",),
    "type": ("default",),
    "factor": (1, None),
    "partial_rotary_factor": (1, None),
}
# The same of a rotation whose positions are divided by a factor.
LINEAR_ROPE: dict[str, tuple[Any, ...]] = {
    "rope_type": ("linear",),
    "type": ("linear",),
    "partial_rotary_factor": (1, None),
}


def rope_objects(fields: Metadata) -> tuple[Metadata, Metadata]:
    """Return the objects that describe a rotation, older versions' first."""
    return fields.inside("rope_scaling"), fields.inside("rope_parameters")


def check_rope(rope: Metadata, plain: Mapping[str, tuple[Any, ...]], *read: str) -> None:
    """Raise unless each value is one that changes nothing, or has a name that is read."""
    names = {name.removeprefix(rope.prefix) for name in rope.values}
    unknown = sorted(names - plain.keys() - set(read))
    rope.check({**plain, **dict.fromkeys(unknown, (None,))})


def agreed(places: Sequence[Place], default: float) -> float:
    """Return the number that is in some of these places, the same in all of them.

    Versions of transformers differ in which place wins.
    """
    found = _numbers(places)
    if len(set(found)) > 1:
        fields, name = places[0]
        raise ValueError(f"load_params expects one {name} in {fields.place}, got {found}.")
    return found[0] if found else default


def first(places: Sequence[Place], default: float) -> float:
    """Return the number in the first of these places that has it."""
    return (_numbers(places) or [default])[0]


def _numbers(places: Sequence[Place]) -> list[float]:
    """Return the numbers that are in some of these places."""
    there = [each for each in places if each[0].prefix + each[1] in each[0].values]
    return [float(fields.get(name, float)) for fields, name in there]
