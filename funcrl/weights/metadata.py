"""The description of a model in a file: values of a kind, or an error that names the file."""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from funcrl.core.files import brief
from funcrl.models import LARGEST, TransformerConfig

_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer above 0", lambda value: type(value) is int and value > 0),
    float: (
        "a finite number above 0",
        lambda value: type(value) in (int, float) and 0 < value < math.inf,
    ),
    bool: ("true or false", lambda value: type(value) is bool),
}


class Metadata(NamedTuple):
    """Values by name, which are checked as they are read."""

    values: Mapping[str, Any]
    place: str
    prefix: str = ""  # of every name

    def get(self, name: str, kind: type, default: Any = None) -> Any:
        """Return a value of a kind; without a default it must be there."""
        found = self.values.get(self.prefix + name, default)
        what, fits = _KINDS[kind]
        if not fits(found):
            raise ValueError(
                f"load_params expects {self.prefix}{name} in {self.place} to be {what}, got "
                f"{brief(found)}."
            )
        return found

    def value(self, name: str) -> Any:
        """Return a value as it is, None if there is none."""
        return self.values.get(self.prefix + name)

    def inside(self, name: str) -> "Metadata":
        """Return the values of an object among these: none if it is absent or null."""
        found = self.value(name)
        if found is not None and not isinstance(found, dict):
            raise ValueError(
                f"load_params expects an object as {self.prefix}{name} in {self.place}, got "
                f"{brief(found)}."
            )
        prefix = f"{self.prefix}{name}."
        return Metadata(
            {prefix + key: each for key, each in (found or {}).items()}, self.place, prefix
        )

    def size(self, name: str, field: str, default: int | None = None) -> int:
        """Return a value for a field of `TransformerConfig`, no larger than such a field may be."""
        return self.at_most(LARGEST[field], name, default)

    def at_most(self, most: int, name: str, default: int | None = None) -> int:
        """Return an integer from 1 to `most`; without a default it must be there."""
        found: int = self.get(name, int, default)
        if found > most:
            raise ValueError(
                f"load_params expects {self.prefix}{name} in {self.place} to be at most {most}, "
                f"got {found}."
            )
        return found

    def check(self, plain: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise unless each value is absent or one that leaves the network as it is here."""
        for name, allowed in plain.items():
            found = self.values.get(self.prefix + name, allowed[0])
            if found not in allowed:
                raise ValueError(
                    f"load_params supports {self.prefix}{name} {allowed[0]!r}, got "
                    f"{brief(found)} in {self.place}."
                )

    def shape(self, sizes: Mapping[str, str], **others: Any) -> TransformerConfig:
        """Return a shape: its sizes by their names here, and its other fields as they are given."""
        width, num_heads = (self.size(sizes[field], field) for field in ("width", "num_heads"))
        defaults = {"num_kv_heads": num_heads, "head_width": max(width // num_heads, 1)}
        fields: dict[str, Any] = {
            field: self.size(name, field, defaults.get(field)) for field, name in sizes.items()
        }
        try:
            return TransformerConfig(**fields, **others)
        except ValueError as error:
            raise ValueError(
                f"load_params expects the shape of a model in {self.place}, got: {error}"
            ) from error
