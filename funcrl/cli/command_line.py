"""What a command line may say: numbers in the digits 0 to 9, and no value after a flag."""

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from funcrl.cli.bench import LoopBenchConfig
from funcrl.config import TrainConfig
from funcrl.config.plain import read_integer, read_number
from funcrl.loop.parity import ParityConfig

# The commands' own options that take no value.
_COMMAND_FLAGS = {
    "train": ("dry-run", "no-dry-run", "trust", "no-trust"), "eval": ("trust", "no-trust"),
}  # fmt: skip
NUMBERS = ConstructorRegistry()
"""How the commands read integers and numbers."""


@NUMBERS.primitive_rule
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


class UsageError(ValueError):
    """The line is not one that the command takes."""


def check_flags(args: Sequence[str]) -> None:
    """Refuse a value after an option that takes none, by name: the parser names the value alone.

    Args:
        args: of the command line, from the name of the command on.

    Example:
        >>> from funcrl.cli.command_line import check_flags
        >>> check_flags(["train", "--no-trust", "7"])
        Traceback (most recent call last):
        funcrl.cli.command_line.UsageError: train expects --no-trust without a value, got '7'.
    """
    options = {"train": TrainConfig, "parity": ParityConfig, "bench loop": LoopBenchConfig}
    command = " ".join(args[: 2 if args[:1] == ["bench"] else 1])
    flags = {*_flags(options[command])} if command in options else set()
    flags |= {f"--{name}" for name in _COMMAND_FLAGS.get(command, ())}
    for text, following in zip(args, [*args[1:], "--"], strict=True):
        name, equals, value = text.partition("=")
        if (name := name.replace("_", "-")) in flags and (equals or not following.startswith("--")):
            raise UsageError(
                f"{command} expects {name} without a value, got {value if equals else following!r}."
            )


def _flags(kind: type[Any], prefix: str = "") -> Iterator[str]:
    """The options of a dataclass that take no value: each bool, and its opposite."""
    for field in fields(kind):
        name = field.name.replace("_", "-")
        if isinstance(field.type, type) and is_dataclass(field.type):
            yield from _flags(field.type, f"{prefix}{name}.")
        elif field.type is bool:
            yield from (f"--{prefix}{name}", f"--{prefix}no-{name}")
