"""The command line: every option is a field of a config dataclass."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from funcrl.cli.command_line import (
    CompileSwitch,
    ExportOptions,
    Line,
    Option,
    ReportOptions,
    StartConfig,
    TrustSwitch,
    UsageError,
    options_of,
    read_line,
    with_compile_options,
    with_values,
)
from funcrl.cli.help import command_help, overview, train_help
from funcrl.cli.preview import list_models
from funcrl.cli.suggest import close, did_you_mean
from funcrl.cli.training import base_config, run_train
from funcrl.config import EvalConfig, TrainConfig
from funcrl.core.files import brief
from funcrl.core.process import VERSION
from funcrl.core.text import print_safely
from funcrl.loop.evaluate import evaluate, format_evaluation
from funcrl.loop.export import export
from funcrl.loop.parity import ParityConfig, format_parity, parity
from funcrl.run import report


class Command(NamedTuple):
    """What a word after `funcrl` does."""

    about: str
    run: Callable[[Line], None]
    configs: tuple[Any, ...]  # whose fields are its options
    rest: str = ""  # what it takes besides options

    def options(self) -> list[Option]:
        """Return the options that it has."""
        return [each for config in self.configs for each in options_of(config)]


def run_command(args: Sequence[str]) -> None:
    """Run the command that the arguments name."""
    if args[:1] == ["--version"]:
        print_safely(f"funcrl {VERSION}")
        return
    name, rest = _command_name(args)
    wanted = [text for text in rest if text in ("-h", "--help", "--help-all")]
    if not name and not wanted:
        raise UsageError(
            f"funcrl expects a command, one of {', '.join(COMMANDS)}, got none; funcrl --help "
            f"describes them."
        )
    if not name:
        print_safely(overview({each: one.about for each, one in COMMANDS.items()}))
        return
    command, whole = COMMANDS[name], "--help-all" in wanted
    own = [text for text in rest if text not in wanted]
    if not wanted:
        command.run(read_line(name, command.options(), own, command.rest))
        return
    if name != "train":
        print_safely(command_help(name, command.about, command.rest, command.options(), whole))
        return
    base = TrainConfig()
    with suppress(UsageError):  # help helps with a line that is wrong
        base = base_config(read_line(name, command.options(), own))
    configs = (StartConfig(), CompileSwitch(), with_compile_options(base))
    print_safely(train_help([each for config in configs for each in options_of(config)], whole))


def read_train_config(args: Sequence[str]) -> TrainConfig:
    """Return the configuration that the options of `funcrl train` say."""
    line = read_line("train", COMMANDS["train"].options(), args)
    config: TrainConfig = with_values(base_config(line), line.values)
    return config


def _command_name(args: Sequence[str]) -> tuple[str, Sequence[str]]:
    """Return the command that a line begins with, "" where it has none, and what follows."""
    if args[:1] and args[0] in COMMANDS:
        return args[0], args[1:]
    if not args or not {"-h", "--help", "--help-all"}.isdisjoint(args[:1]):
        return "", args
    if args[0].startswith("-"):
        raise UsageError(f"funcrl expects a command first, got {brief(args[0])}.")
    meant = did_you_mean([f"funcrl {each}" for each in close(args[0], COMMANDS)])
    where = "" if "?" in meant else " funcrl --help lists them."
    raise UsageError(f"funcrl has no command {brief(args[0])}{meant}{where}")


def _eval(line: Line) -> None:
    config, trust = with_values(EvalConfig(), line.values), line.values.get("trust", False)
    result = evaluate(config, trust=trust, note=partial(print_safely, file=sys.stderr))
    print_safely(format_evaluation(result))


def _parity(line: Line) -> None:
    config = with_values(ParityConfig(), line.values)
    result = parity(config)
    print_safely(json.dumps(result.as_json()) if config.json else format_parity(config, result))
    if not result.largest <= config.limit:
        sys.exit(1)


def _export(line: Line) -> None:
    options: ExportOptions = with_values(ExportOptions(), line.values)
    if options.run is None or options.out is None:
        missing = "--run" if options.run is None else "--out"
        raise UsageError(f"export expects --run RUN and --out PATH, got no {missing}.")
    note = partial(print_safely, file=sys.stderr)
    print_safely(str(export(options.run, options.out, note=note)))


def _report(line: Line) -> None:
    options = with_values(ReportOptions(), line.values)
    print_safely(str(_write_report([Path(each) for each in line.rest], options.out)))


def _models(line: Line) -> None:
    del line
    print_safely(list_models())


def _write_report(folders: Sequence[Path], out: Path | None) -> Path:
    if not folders:
        raise ValueError("report expects the folder of a run, or several, got none.")
    if len(folders) > 1:
        return report.write_comparison(folders, out or folders[0].parent / "comparison")
    if out is not None:
        raise ValueError(
            f"report expects --out with several runs, got {out}; the page about one run is in its "
            f"folder."
        )
    return report.write_report(folders[0])


COMMANDS = {
    "train": Command(
        "Train a policy with reinforcement learning: the whole loop, on this machine.",
        run_train,
        (StartConfig(), CompileSwitch(), with_compile_options(TrainConfig())),
    ),
    "eval": Command(
        "Print accuracy with its interval, pass@k and majority@k on held-out prompts.",
        _eval,
        (EvalConfig(), TrustSwitch()),
    ),
    "report": Command(
        "Write a page about a run, or one that compares several.",
        _report,
        (ReportOptions(),),
        "RUN ...",
    ),
    "export": Command(
        "Write what a run has trained as a Hugging Face folder, or a .gguf file; run no task.",
        _export,
        (ExportOptions(),),
    ),
    "models": Command(
        "List the shapes and the pretrained weights that have a name.",
        _models,
        (),
    ),
    "parity": Command(
        "Compare a generator's log-probabilities with the trainer's; exit 1 if they differ.",
        _parity,
        (ParityConfig(),),
    ),
}
