"""The program `funcrl`: runs the command that its arguments name, and exits as programs do."""

import atexit
import gc
import importlib
import json
import os
import select
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from funcrl.cli.device import say_of_idle_gpu
from funcrl.cli.help import overview, train_help
from funcrl.cli.options import (
    CompileSwitch,
    ExportOptions,
    PromptOptions,
    ReportOptions,
    StartConfig,
    TrustSwitch,
    UsageError,
    describe,
    options_of,
    parse,
    with_compile_options,
)
from funcrl.cli.ranks import is_first_rank, left_alone, rank_label, tell_torchrun
from funcrl.cli.train import base_config, list_models, read_line, run_train
from funcrl.config import ChatConfig, EvalConfig, GenerateConfig, ServeConfig, TrainConfig
from funcrl.config.names import close, did_you_mean, understood
from funcrl.core.files import brief
from funcrl.core.printing import print_safely, safe_warnings
from funcrl.core.process import VERSION, ExplainedMemoryError, is_out_of_memory, refuse_ranks
from funcrl.generators import EngineError
from funcrl.loop.card import write_card
from funcrl.loop.evaluate import evaluate, format_evaluation
from funcrl.loop.export import export
from funcrl.loop.parity import ParityConfig, format_parity, parity
from funcrl.loop.rollouts.grade import RewardError
from funcrl.run import report
from funcrl.run.checkpoint import CheckpointError
from funcrl.serve.chat import NEW, chat
from funcrl.serve.generate import generate
from funcrl.serve.serve import serve
from funcrl.tasks.reward_calls import describe_error, is_of_user
from funcrl.weights import push_to_hub
from funcrl.weights.hub import check_name

# Errors that a user can mend; any other is a bug, and is shown with its traceback.
_EXPECTED = (
    ValueError, OSError, ImportError, CheckpointError, EngineError, ExplainedMemoryError,
    RewardError,
)  # fmt: skip

# What is said where memory ran out, by the command.
_LESS_MEMORY = {
    "train": "Memory ran out: --microbatch, --logprob-chunk and --slots lower what a run needs, "
    "--dry-run prints the parts, and docs/recipes.md has more options in order.",
    "eval": "Memory ran out: --slots lowers what an evaluation needs.",
}
_TRACEBACK = "FUNCRL_TRACEBACK=1 in the environment shows the traceback."


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name.

    Exit with 0, 1 (failed), 2 (usage), 130 or 143 (a signal), or 141 (nobody reads the output).
    """
    if args is None:  # the process is this command's alone
        # No collection goes over what was imported: 200,000 objects, a tenth of a second each time.
        gc.freeze()
        atexit.register(gc.unfreeze)  # else triton reports what is left at exit
    args = sys.argv[1:] if args is None else list(args)
    # vLLM logs a great deal to the screen on which the run is shown.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        try:
            _run(args)
        finally:
            if sys.stdout is not None:  # as it is where a program is started with it closed
                sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more as it exits, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _run(args: Sequence[str]) -> None:
    """Run a command, and print the error that ends it."""
    try:
        with safe_warnings(sys.stderr):
            run_command(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads_output():
            raise
        alone = left_alone(error)
        if alone:
            print_safely(f"{rank_label()}: {alone}", sys.stderr)
            sys.exit(1)
        expected = isinstance(error, _EXPECTED)
        ran_out = not expected and is_out_of_memory(error)
        explained = (expected or ran_out) and "FUNCRL_TRACEBACK" not in os.environ
        # Notes say what happened on the error's way, such as what is saved.
        message, notes = str(error), list(getattr(error, "__notes__", []))
        if ran_out:
            message = message or type(error).__name__  # Python's own error says nothing
            notes.insert(0, f"{_LESS_MEMORY.get(args[0], 'Memory ran out.')} {_TRACEBACK}")
        elif expected and is_of_user(error):  # the message alone does not say where
            message = describe_error("Your code", error)
        lines = [f"{rank_label()}: {message}", *notes]
        if not explained:
            tell_torchrun(error)
        print_safely("\n".join(lines) if explained else traceback.format_exc(), sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _nobody_reads_output() -> bool:
    """Return whether standard output is a pipe whose reader has gone, such as `head`."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError):  # None where it is closed; a notebook's is no file
        return False
    poll = select.poll()
    poll.register(output, 0)  # an error is reported in any case
    return bool(poll.poll(0))


class Command(NamedTuple):
    """What a word after `funcrl` does."""

    about: str
    run: Callable[[Sequence[str]], None]  # of what follows on the line
    configs: tuple[Any, ...]  # whose fields are its options
    first: str = ""  # the option whose value may come first, without its name


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
    configs = list(command.configs)
    if not wanted:
        if name != "train":
            refuse_ranks(name)
        command.run(_in_own_words(command, rest))
        return
    if name == "train":
        base = TrainConfig()
        with suppress(UsageError):  # help helps with a line that is wrong
            base = base_config([text for text in rest if text not in wanted])
        configs = [StartConfig(), CompileSwitch(), with_compile_options(base)]
        if not whole:
            options = [each for config in configs for each in options_of(config)]
            print_safely(train_help(options))
            return
    short = (
        f"\n\nIn short: `funcrl {name} X` is `funcrl {name} --{command.first} X`."
        if command.first
        else ""
    )
    print_safely(describe(name, command.about + short, *configs))


def _in_own_words(command: Command, args: Sequence[str]) -> Sequence[str]:
    """Return a line with the names of the command's options, and say which were others."""
    if command.first and args and not args[0].startswith("-"):
        args = [f"--{command.first}", *args]
    options = [each.name for config in command.configs for each in options_of(config)]
    line, others = understood(args, options)
    if others and is_first_rank():
        said = ", ".join(f"{flag} is {meant}" for flag, meant in others.items())
        print_safely(f"{said}.", sys.stderr)
    return line


def read_train_config(args: Sequence[str]) -> TrainConfig:
    """Return the configuration that the options of `funcrl train` say."""
    return read_line(args)[1]


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


def _eval(args: Sequence[str]) -> None:
    config, switch = parse("eval", args, EvalConfig(), TrustSwitch())
    say_of_idle_gpu(args, config.device, config.model)
    result = evaluate(config, trust=switch.trust, note=partial(print_safely, file=sys.stderr))
    print_safely(format_evaluation(result))


def _parity(args: Sequence[str]) -> None:
    config, switch = parse("parity", args, ParityConfig(), TrustSwitch())
    result = parity(config, trust=switch.trust)
    print_safely(json.dumps(result.as_json()) if config.json else format_parity(config, result))
    if not result.largest <= config.limit:
        sys.exit(1)


def _export(args: Sequence[str]) -> None:
    (options,) = parse("export", args, ExportOptions())
    name = options.push_to_hub
    if options.run is None or (options.out is None and name is None):
        missing = "--run" if options.run is None else "--out"
        raise UsageError(f"export expects --run RUN and --out PATH, got no {missing}.")
    if name is not None:
        check_name(name)  # before minutes of writing
    elif options.private:
        raise UsageError("export expects --push-to-hub with --private, got none.")
    with tempfile.TemporaryDirectory() as folder:  # where nobody else wants the files
        out = options.out or Path(folder) / "model"
        note = partial(print_safely, file=sys.stderr)
        out = export(options.run, out, note=note, adapters=options.adapters)
        if options.out is not None:
            print_safely(str(out))
        if name is None:
            return
        if out.is_file():
            raise UsageError(f"export expects --out to be a folder with --push-to-hub, got {out}.")
        write_card(options.run, out)
        print_safely(push_to_hub(out, name, private=options.private))


def _report(args: Sequence[str]) -> None:
    (options,) = parse("report", args, ReportOptions())
    print_safely(str(_write_report(options.runs, options.out)))


def _serve(args: Sequence[str]) -> None:
    config, switch = parse("serve", args, ServeConfig(), TrustSwitch())
    say_of_idle_gpu(args, config.device, config.model)
    serve(config, partial(print_safely, file=sys.stderr), switch.trust)


def _generate(args: Sequence[str]) -> None:
    config, options, switch = parse(
        "generate", args, GenerateConfig(), PromptOptions(), TrustSwitch()
    )
    say_of_idle_gpu(args, config.device, config.model)
    prompts = options.prompts
    if not prompts and not sys.stdin.isatty():
        prompts = [sys.stdin.read().removesuffix("\n")]
    answers = generate(config, prompts, partial(print_safely, file=sys.stderr), switch.trust)
    for answer in answers:
        print_safely(json.dumps(answer._asdict()) if config.json else answer.text)


def _chat(args: Sequence[str]) -> None:
    config, switch = parse("chat", args, ChatConfig(), TrustSwitch())
    say_of_idle_gpu(args, config.device, config.model)
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        importlib.import_module("readline")  # by which `input` edits lines, and recalls them
        print_safely(f"{NEW} begins a new conversation, Ctrl-D ends.", file=sys.stderr)
    lines = iter(partial(input, "> "), None) if is_terminal else sys.stdin
    write = partial(print_safely, end="")
    try:
        chat(config, lines, write, partial(print_safely, file=sys.stderr), switch.trust)
    except EOFError:  # Ctrl-D
        print_safely("")


def _models(args: Sequence[str]) -> None:
    parse("models", args)
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
        first="run",
    ),
    "report": Command(
        "Write a page about a run, or one that compares several.",
        _report,
        (ReportOptions(),),
    ),
    "export": Command(
        "Write what a run has trained as a Hugging Face folder, or a .gguf file; run no task.",
        _export,
        (ExportOptions(),),
        first="run",
    ),
    "generate": Command(
        "Print a model's answers to prompts.",
        _generate,
        (GenerateConfig(), PromptOptions(), TrustSwitch()),
    ),
    "chat": Command(
        "Talk to a model: its answers appear while they are drawn.",
        _chat,
        (ChatConfig(), TrustSwitch()),
        first="model",
    ),
    "serve": Command(
        "Serve a model at an address of this machine, to OpenAI's clients and to Tinker's.",
        _serve,
        (ServeConfig(), TrustSwitch()),
        first="model",
    ),
    "models": Command(
        "List the shapes and the pretrained weights that have a name.",
        _models,
        (),
    ),
    "parity": Command(
        "Compare a generator's log-probabilities with the trainer's; exit 1 if they differ.",
        _parity,
        (ParityConfig(), TrustSwitch()),
        first="model",
    ),
}
