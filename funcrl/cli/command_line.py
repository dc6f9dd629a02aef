"""Options of the commands: their names, how a line is read, and how it changes a configuration."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, get_args, get_type_hints

from funcrl.cli.suggest import did_you_mean, suggest
from funcrl.cli.values import read_value, takes_many
from funcrl.config import CompileConfig, TrainConfig
from funcrl.core.arguments import check_value
from funcrl.core.files import brief

# Groups that are named by one of their options: `--algorithm dapo` is `--algorithm.name dapo`.
_NAMED = ("algorithm", "optimizer")


class UsageError(ValueError):
    """The command does not take these arguments."""


@dataclass(frozen=True)
class StartConfig:
    """How `funcrl train` starts: what is no option of the run itself."""

    resume: Path | None = None
    """Continue the run in this folder, with its options. Those given here come first; what says
    what is trained must stay."""
    fork: Path | None = None
    """With resume: leave that run as it is, and begin one in this new folder as its newest
    checkpoint, with any options."""
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


@dataclass(frozen=True)
class TrustSwitch:
    """Whether a run's code may run."""

    trust: bool = False
    """Run the code that the run's folder names, such as a task of one's own, even if this account
    has not run it before or it has changed."""


@dataclass(frozen=True)
class ExportOptions:
    """What is exported, and where it goes."""

    run: Path | None = None
    """The folder of a run."""
    out: Path | None = None
    """Where the model goes: a Hugging Face folder, or a .gguf file."""


@dataclass(frozen=True)
class ReportOptions:
    """Where a page goes."""

    out: Path | None = None
    """Where a comparison goes: a folder, `comparison` beside the first run when left out."""


class Option(NamedTuple):
    """An option of a command: a field of a configuration, or of one inside it."""

    name: str  # without the leading dashes, such as optimizer.learning-rate
    kind: Any  # the type
    hint: Any  # the annotation, which may say the bounds of a number
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


class Line(NamedTuple):
    """A command line that has been read."""

    args: Sequence[str]  # as they were given
    values: Mapping[str, Any]  # of the options that were given, by name
    rest: Sequence[str]  # what belongs to no option


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
            yield Option(f"{prefix}{name}", kind, field.type, default, type(config))


def read_line(command: str, options: Sequence[Option], args: Sequence[str], rest: str = "") -> Line:
    """Return what a line says; of an option that is given twice, the last one counts.

    Args:
        command: for errors.
        options: those of the command.
        args: the line, without the command.
        rest: what stands for arguments that belong to no option, "" if there may be none.
    """
    named = {flag: option for option in options for flag in option.flags}
    values: dict[str, Any] = {}
    others: list[str] = []
    place = 0
    while place < len(args):
        text, place = args[place], place + 1
        if not _is_option(text):
            others.append(text)
            continue
        given, equals, value = text.partition("=")
        flag = _full_name(given.replace("_", "-"), named)
        texts = [value] if equals else []
        while place < len(args) and not _is_option(args[place]):
            texts.append(args[place])
            place += 1
        option = named.get(flag)
        if option is None:
            raise UsageError(_unknown(command, given, [each.name for each in options]))
        if rest and option.kind is not bool and len(texts) > 1 and not takes_many(option.kind):
            others += texts[1:]
            del texts[1:]
        values[option.name] = _read(command, option, flag, texts)
    if others and not rest:
        raise UsageError(f"{command} expects options, which begin with --, got {brief(others[0])}.")
    return Line(args, values, others)


def with_values(config: Any, values: Mapping[str, Any], prefix: str = "") -> Any:
    """Return a configuration with the values of options; a group's are put in together."""
    changes: dict[str, Any] = {}
    for field in fields(config):
        name = prefix + field.name.replace("_", "-")
        before = getattr(config, field.name)
        if field.name == "compile" and CompileConfig in get_args(field.type):
            changes[field.name] = _compilation(before, values, name)
        elif is_dataclass(before):
            changes[field.name] = with_values(before, values, f"{name}.")
        elif name in values:
            changes[field.name] = values[name]
    return replace(config, **changes)


def with_compile_options(config: TrainConfig) -> TrainConfig:
    """Return the options with those of compilation, so that the command line has them."""
    return replace(config, compile=config.compile or CompileConfig())


def _compilation(
    before: CompileConfig | None, values: Mapping[str, Any], name: str
) -> CompileConfig | None:
    """Return how a step is compiled: the switch, or one of the options, turns that on."""
    has_options = any(each.startswith(f"{name}.") for each in values)
    switch = values.get(name, has_options or before is not None)
    if has_options and not switch:
        raise UsageError("train expects --no-compile without --compile.*, got both.")
    made: CompileConfig = with_values(before or CompileConfig(), values, f"{name}.")
    return made if switch else None


def _is_option(text: str) -> bool:
    """Return whether a text names an option; a negative number does not."""
    return text.startswith("-") and len(text) > 1 and not (text[1].isdigit() or text[1] == ".")


def _full_name(flag: str, named: Mapping[str, Option]) -> str:
    last = flag.removeprefix("--").rpartition(".")[2]
    return f"{flag}.name" if last in _NAMED and f"{flag}.name" in named else flag


def _unknown(command: str, given: str, names: Sequence[str]) -> str:
    name = given.lstrip("-").replace("_", "-")
    meant = [f"--{each}" for each in suggest(name, names)] if given != "--" else []
    where = "" if meant else f" funcrl {command} --help-all lists them."
    return f"{command} has no option {brief(given)[1:-1]}{did_you_mean(meant)}{where}"


def _read(command: str, option: Option, flag: str, texts: Sequence[str]) -> Any:
    """Return the value that the texts after an option say, in its type and its bounds."""
    if option.kind is bool:
        if texts:
            raise UsageError(f"{command} expects {flag} without a value, got {brief(texts[0])}.")
        return flag == option.flags[0]
    if not takes_many(option.kind) and len(texts) != 1:
        got = " and ".join(map(brief, texts)) or "none"
        raise UsageError(f"{command} expects one value after {flag}, got {got}.")
    try:
        value = read_value(option.kind, texts)
        check_value(command, flag, option.hint, value)
    except (ValueError, TypeError) as error:
        reason = str(error)
        if reason.startswith("expects "):
            reason = f"{command} expects {flag} to be {reason.removeprefix('expects ')}"
        raise UsageError(reason) from error
    return value
