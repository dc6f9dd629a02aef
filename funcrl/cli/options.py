"""The options of a command: its dataclasses, read from a line by tyro."""

import contextlib
import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, make_dataclass, replace
from itertools import dropwhile, takewhile
from pathlib import Path
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    get_args,
    get_origin,
    get_type_hints,
)

import tyro

from funcrl.cli.rules import REGISTRY
from funcrl.config import CompileConfig, TrainConfig
from funcrl.config.names import close, did_you_mean, no_option, suggest
from funcrl.config.plain import section_of
from funcrl.core.arguments import FinitePositive
from funcrl.core.files import brief

# Groups that are named by one of their options: `--algorithm dapo` is `--algorithm.name dapo`.
_NAMED = ("algorithm", "optimizer")
_FORMS = {
    bool: "True or False",
    int: "an integer in the digits 0 to 9",
    float: "a number in the digits 0 to 9",
}
Config = TypeVar("Config")


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
    num_train_epochs: FinitePositive | None = None
    """In place of steps: how often each training row of a file or a data set is asked."""
    seeds: tuple[int, ...] = ()
    """Train once with each of these seeds, one after another, in folders seed-N of the run's
    folder, which gets a page with their means. The same line goes on with what is left."""
    dry_run: bool = False
    """Print the resolved configuration and the memory that it needs, and stop."""
    choose: bool = True
    """Choose the options of speed and memory that are not given by the model's shape, the lengths
    and the GPU's memory, on a CPU packing alone; a line says them. no-choose leaves the
    defaults."""
    gpu_memory: FinitePositive | None = None
    """The gigabytes of the GPU to choose for; those of this machine's when left out."""
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
    push_to_hub: str | None = None
    """Upload what is written as this model of the hub, ORG/NAME; without out it is kept nowhere
    else."""
    private: bool = False
    """With push-to-hub: make a new model private."""
    adapters: bool = False
    """Write the adapters that the run has trained, in the format of peft, and not the whole
    model."""


@dataclass(frozen=True)
class PromptOptions:
    """What a model is asked."""

    prompts: tyro.conf.Positional[tuple[str, ...]] = ()
    """The prompts; standard input is one where there are none."""


@dataclass(frozen=True)
class ReportOptions:
    """What a page is about, and where it goes."""

    runs: tyro.conf.Positional[tuple[Path, ...]] = ()
    """The folders of runs."""
    out: Path | None = None
    """Where a comparison goes: a folder, `comparison` beside the first run when left out."""


class Option(NamedTuple):
    """An option of a command: a field of a configuration, or of one inside it."""

    name: str  # without the leading dashes, such as optimizer.learning-rate
    kind: Any  # the type
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
    for each in fields(config):
        name, kind = each.name.replace("_", "-"), kinds[each.name]
        default = getattr(config, each.name)
        inner = section_of(kind)
        if inner is not None:
            yield from options_of(inner() if default is None else default, f"{prefix}{name}.")
        elif not _is_positional(each):
            yield Option(f"{prefix}{name}", kind, default, type(config))


def _is_positional(each: Any) -> bool:
    """Return whether a field of a configuration is given without a name."""
    return tyro.conf.Positional in getattr(each.type, "__metadata__", ())


def parse(command: str, args: Sequence[str], *configs: Any) -> list[Any]:
    """Return configurations with the values of the options that a line gives them.

    Of an option that is given twice, the last one counts.

    Args:
        command: for errors.
        args: the line, without the command.
        configs: the options of the command, and their defaults.
    """
    named = [each.name for config in configs for each in fields(config) if _is_positional(each)]
    args = [each for text in args for each in _without_name(_full_name(text), named)]
    options = {
        flag: each for config in configs for each in options_of(config) for flag in each.flags
    }
    for text, follows in zip(args, [*args[1:], "--"], strict=False):
        flag, equals, value = text.partition("=")
        if not _is_option(text):
            continue
        if flag not in options:
            raise UsageError(_unknown(command, args, options))
        has_value = equals or not (_is_option(follows) or named)
        if options[flag].kind is bool and has_value:
            got = brief(value if equals else follows)
            raise UsageError(f"{command} expects {flag} without a value, got {got}.")
        kinds = (options[flag].kind, *get_args(options[flag].kind))
        if Path in kinds and not (value if equals else follows):  # the working directory to Path
            raise UsageError(f"{command} expects {flag} to be a path, got ''.")
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            line = _read(command, args, configs)
    except SystemExit:
        reason, cause = _in_one_line(command, args, options, said.getvalue()), None
    except (ValueError, TypeError) as error:  # of a configuration that refuses its values
        reason, cause = str(error), error
    else:
        return line
    raise UsageError(_by_option(command, args, options.values(), reason)) from cause


def describe(command: str, about: str, *configs: Any) -> str:
    """Return the help of a command: all of its options, in groups, as wide as the terminal."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        _read(command, ["--help"], configs, about)
    return "\n".join(line.rstrip() for line in said.getvalue().strip().splitlines())


def _read(command: str, args: Sequence[str], configs: Sequence[Any], about: str = "") -> list[Any]:
    parts: list[Any] = [
        (f"part{n}", Annotated[type(config), tyro.conf.arg(name="")], field(default=config))
        for n, config in enumerate(configs)
    ]
    line: Any = tyro.cli(
        make_dataclass("Line", parts, frozen=True),
        prog=f"funcrl {command}",
        description=about,
        args=args,
        add_help=bool(about),
        registry=REGISTRY,
        config=(tyro.conf.AvoidSubcommands,),
    )
    return [getattr(line, name) for name, *_ in parts]


def given(args: Sequence[str]) -> list[str]:
    """Return the names of the options on a line, such as `optimizer.learning-rate`."""
    flags = [_full_name(text).partition("=")[0] for text in args if _is_option(text)]
    return [flag.removeprefix("--") for flag in flags]


def value_of(args: Sequence[str], name: str) -> str | None:
    """Return the text after the last option of a name on a line, None if there is none."""
    found = None
    for place, text in enumerate(map(_full_name, args)):
        flag, equals, value = text.partition("=")
        if flag == f"--{name}":
            follows = args[place + 1] if place + 1 < len(args) else ""
            found = value if equals else "" if _is_option(follows) else follows
    return found or None


def with_compile_options(config: TrainConfig) -> TrainConfig:
    """Return the options with those of compilation, so that the command line has them."""
    return replace(config, compile=config.compile or CompileConfig())


def is_compiled(base: TrainConfig, args: Sequence[str]) -> bool:
    """Return whether a step is compiled: by the switch, by one of its options, or as in `base`."""
    names = given(args)
    has_options = any(name.startswith("compile.") for name in names)
    switches = [name == "compile" for name in names if name in ("compile", "no-compile")]
    if not switches:
        return has_options or base.compile is not None
    if has_options and not switches[-1]:
        raise UsageError("train expects --no-compile without --compile.*, got both.")
    return switches[-1]


def _is_option(text: str) -> bool:
    """Return whether a text names an option; a negative number does not."""
    return text.startswith("-") and len(text) > 1 and not (text[1].isdigit() or text[1] == ".")


def _full_name(text: str) -> str:
    """Return an option with dashes for underscores, and a group's own name as that of its name."""
    if not _is_option(text):
        return text
    flag, equals, value = text.partition("=")
    flag = flag.replace("_", "-")
    if flag.removeprefix("--").rpartition(".")[2] in _NAMED:
        flag += ".name"
    return flag + equals + value


def _without_name(text: str, named: Sequence[str]) -> list[str]:
    """Return what a text of a line says; values that stand by themselves may have a name before.

    Args:
        text: of the line.
        named: what such values are called, as --prompts or --prompt.
    """
    flag, equals, value = text.partition("=")
    names = {f"--{each}" for name in named for each in (name, name.removesuffix("s"))}
    if flag not in names:
        return [text]
    return [value] if equals else []


def _unknown(command: str, args: Sequence[str], options: Mapping[str, Option]) -> str:
    """Return an error about all options of a line that there are not, and what was meant."""
    flags = [text.partition("=")[0] for text in args if _is_option(text)]
    names = [each.name for each in options.values()]
    wrong = {
        brief(flag)[1:-1]: [f"--{name}" for name in suggest(flag.lstrip("-"), names)]
        for flag in flags
        if flag not in options
    }
    where = "" if any(wrong.values()) else f" funcrl {command} --help-all lists them."
    return no_option(command, wrong) + where


def _is_rule(line: str) -> bool:
    return not line.strip("-─╭╮╰╯")


def _in_one_line(
    command: str, args: Sequence[str], options: Mapping[str, Option], printed: str
) -> str:
    """Return tyro's error, which it prints as a box with help in it, in the words of our own."""
    lines = [line.strip(" │") for line in printed.splitlines()[1:]]  # without the title
    texts = dropwhile(_is_rule, lines)
    said = " ".join(takewhile(lambda line: not _is_rule(line), texts))
    if extra := re.match(r"Unrecognized (?:or misplaced )?options?: (.*)", said):
        text = extra[1].split(", ")[0]
        place = args.index(text) if text in args else len(args)
        before = [each for each in args[:place] if _is_option(each)]
        if not before:
            return f"{command} expects options, which begin with --, got {brief(text)}."
        return f"{command} expects no {brief(text)} after {before[-1].partition('=')[0]}."
    if missing := re.match(r"Missing value for argument '([^',]+)", said):
        return f"{command} expects a value after {missing[1]}, got none."
    if choice := re.match(r"invalid choice '(.*)' for argument '([^',]+)", said):
        value, flag, kind = choice[1], choice[2], options[choice[2]].kind
        meant = did_you_mean(close(value, _choices(kind)))
        return f"{command} expects {flag} to be {_form(kind)}, got {brief(value)}{meant}"
    where, _, reason = said.removeprefix("Error parsing ").partition(": ")
    if not where.startswith("-"):
        return reason  # of a configuration that refuses its values
    if tried := re.match(r"(?:no type matching|Could not find).*? \[(.*?)\]", reason):
        return f"{command} expects {where} to be {_form(options[where].kind)}, got {tried[1]}."
    return f"{command} expects {where} to be {reason.removeprefix('expects ')}"


def _choices(kind: Any) -> list[str]:
    """Return the words that an option of a type takes, in their order."""
    parts = [kind] if get_origin(kind) is Literal else get_args(kind)
    return [str(word) for part in parts if get_origin(part) is Literal for word in get_args(part)]


def _form(kind: Any) -> str:
    """Return what the values of a type look like on a line."""
    if kind in _FORMS:
        return _FORMS[kind]
    if get_origin(kind) is Literal:
        return " or ".join(_choices(kind))
    parts = [_form(part) for part in get_args(kind) if part not in (type(None), ...)]
    return f"{parts[0]}, or several" if get_origin(kind) is tuple else " or ".join(parts)


def _by_option(command: str, args: Sequence[str], options: Iterable[Option], reason: str) -> str:
    """Return what a configuration says of a field in the name of the option that sets it."""
    said = re.match(r"(\w+) expects (\w+)(?:\[\d+\])? (.*)", reason)
    if said is None:
        return reason
    names = [each.name for each in options if (each.owner.__name__, each.field) == said.group(1, 2)]
    if not names:
        return reason
    name = next((each for each in names if each in given(args)), names[0])
    group, _, last = name.rpartition(".")
    flag = group if last == "name" and group in _NAMED else name
    return f"{command} expects --{flag} {said[3]}"
