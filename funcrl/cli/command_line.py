"""Options of the commands: their names, how numbers are read, and flags, which take no value."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from funcrl.cli.bench import LoopBenchConfig
from funcrl.config import CompileConfig, TrainConfig
from funcrl.config.plain import read_integer, read_number
from funcrl.loop.parity import ParityConfig

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
    """The command does not take these arguments."""


@dataclass(frozen=True)
class StartConfig:
    """How `funcrl train` starts: what is no option of the run itself."""

    resume: Path | None = None
    """Continue the run in this folder, with its options; those given here come first."""
    config: Path | None = None
    """Read options from a YAML file, such as a run's config.yaml; those given here come first."""
    dry_run: bool = False
    """Print the resolved configuration and the memory that it needs, and stop."""
    trust: bool = False
    """Run the code that a configuration file or a run's folder names, such as a task of one's own,
    even if this account has not run it before or it has changed."""


@dataclass(frozen=True)
class CompileSwitch:
    """Whether the training step is compiled."""

    compile: bool = False
    """Compile the training step. Each option in the group of compile, such as compile.backend,
    turns this on; no-compile turns off what a file or a resumed run turns on."""


def with_compile_options(config: TrainConfig) -> TrainConfig:
    """Return the options with those of compilation, so that the command line has them."""
    return replace(config, compile=config.compile or CompileConfig())


def switch_of(config: TrainConfig, args: Sequence[str], prefix: str = "") -> CompileSwitch:
    """Return the switch's default: on where the configuration compiles, or the line says how."""
    return CompileSwitch(config.compile is not None or _names_compile(args, prefix))


def with_switch(
    command: str, config: TrainConfig, switch: CompileSwitch, args: Sequence[str], prefix: str = ""
) -> TrainConfig:
    """Return the options without those of compilation where it is off."""
    if switch.compile:
        return config
    if _names_compile(args, prefix):
        raise UsageError(
            f"{command} expects --{prefix}no-compile without --{prefix}compile.*, got both."
        )
    return replace(config, compile=None)


def _names_compile(args: Sequence[str], prefix: str) -> bool:
    """Return whether the line has an option of compilation besides the switch."""
    return any(text.startswith(f"--{prefix}compile.") for text in args)


class Option(NamedTuple):
    """An option of a command: a field of a configuration, or of one inside it."""

    name: str  # without the leading dashes, such as optimizer.learning-rate
    kind: Any  # the annotation
    default: Any
    owner: type[Any]  # the dataclass whose field it is

    @property
    def field(self) -> str:
        """The name of the field."""
        return self.name.rpartition(".")[2].replace("-", "_")

    @property
    def flags(self) -> tuple[str, ...]:
        """What the command line calls it; a bool has a second name for its opposite."""
        prefix, dot, last = self.name.rpartition(".")
        opposite = (f"--{prefix}{dot}no-{last}",) if self.kind is bool else ()
        return (f"--{self.name}", *opposite)


def options_of(config: Any, prefix: str = "") -> Iterator[Option]:
    """Yield the options of a configuration and of those inside it, in the order of the fields."""
    kinds = get_type_hints(type(config))
    for field in fields(config):
        name, kind = field.name.replace("_", "-"), kinds[field.name]
        default = getattr(config, field.name)
        inner: Any = next((each for each in (kind, *get_args(kind)) if is_dataclass(each)), None)
        if inner is not None:
            yield from options_of(inner() if default is None else default, f"{prefix}{name}.")
        else:
            yield Option(f"{prefix}{name}", kind, default, type(config))


def check_flags(args: Sequence[str]) -> None:
    """Raise an error that names the option if a value follows one that takes none.

    The parser's own error names the value alone.
    """
    command = " ".join(args[: 2 if args[:1] == ["bench"] else 1])
    options = {
        "train": [
            *options_of(TrainConfig()),
            *options_of(StartConfig()),
            *options_of(CompileSwitch()),
        ],
        "parity": options_of(ParityConfig()),
        "bench loop": [*options_of(LoopBenchConfig()), *options_of(CompileSwitch(), "train.")],
    }.get(command, ())
    flags = {flag for option in options if option.kind is bool for flag in option.flags}
    flags |= {"--trust", "--no-trust"} if command == "eval" else set()
    for text, following in zip(args, [*args[1:], "--"], strict=True):
        name, equals, value = text.partition("=")
        if (name := name.replace("_", "-")) in flags and (equals or not following.startswith("--")):
            raise UsageError(
                f"{command} expects {name} without a value, got {value if equals else following!r}."
            )
