"""What a file says of its model: values of a known kind, or an error that names the file."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from funcrl.models import TransformerConfig

_KINDS: dict[type, tuple[str, Callable[[Any], bool]]] = {
    int: ("an integer above 0", lambda value: type(value) is int and value > 0),
    float: (
        "a finite number above 0",
        lambda value: type(value) in (int, float) and 0 < value < math.inf,
    ),
    bool: ("true or false", lambda value: type(value) is bool),
}


class Described(NamedTuple):
    """Values by name, each checked as it is read."""

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
                f"{found!r}."
            )
        return found

    def check(self, plain: Mapping[str, tuple[Any, ...]]) -> None:
        """Raise unless each value is absent, or one under which the network is the plain one."""
        for name, allowed in plain.items():
            found = self.values.get(self.prefix + name, allowed[0])
            if found not in allowed:
                raise ValueError(
                    f"load_params supports {self.prefix}{name} {allowed[0]!r}, got {found!r} in "
                    f"{self.place}."
                )

    def shape(self, **fields: Any) -> TransformerConfig:
        """Return a shape of these fields."""
        try:
            return TransformerConfig(**fields)
        except ValueError as error:
            raise ValueError(
                f"load_params expects the shape of a model in {self.place}, got: {error}"
            ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a file of JSON.

    Example:
        >>> import pathlib, tempfile
        >>> from funcrl.weights.described import read_json
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "config.json"
        >>> _ = path.write_text('{"vocab_size": 13}')
        >>> read_json(path)
        {'vocab_size': 13}
    """
    if not path.is_file():
        raise FileNotFoundError(f"load_params expects {path}, got no such file.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"load_params expects JSON in {path}, got {error}.") from error
    if not isinstance(values, dict):
        raise ValueError(f"load_params expects an object in {path}, got {type(values).__name__}.")
    return values
