"""The command line: every option is a field of a config dataclass."""

import json
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated

from tyro.conf import AvoidSubcommands, arg
from tyro.extras import SubcommandApp

from funcrl.cli.bench import (
    GenerateBenchConfig,
    LoopBenchConfig,
    StepBenchConfig,
    VLLMBenchConfig,
    bench_generate,
    bench_loop,
    bench_step,
    bench_vllm,
    format_rows,
)
from funcrl.cli.command_line import (
    NUMBERS,
    CompileSwitch,
    StartConfig,
    check_flags,
    switch_of,
    with_compile_options,
    with_switch,
)
from funcrl.cli.help import train_help
from funcrl.cli.preview import describe_run, list_models
from funcrl.config import EvalConfig, TrainConfig, read_config
from funcrl.core.terminal import print_safely
from funcrl.loop.evaluate import evaluate, format_evaluation
from funcrl.loop.export import export
from funcrl.loop.parity import ParityConfig, format_parity, parity
from funcrl.loop.sources import defaults
from funcrl.loop.train import train as run_training
from funcrl.run import report, runs
from funcrl.run.folder import free_folder
from funcrl.run.trust import cache_code, check_trusted, named_code
from funcrl.run.views import view_for
from funcrl.tasks import data_file


class _Stop:
    """Asks a run to stop after its step at the first SIGINT or SIGTERM, and at once at the second.

    A handler that raises is not enough: raised inside a destructor or a callback of the garbage
    collector, an exception is printed and forgotten.
    """

    def __init__(self) -> None:
        self.received: int | None = None

    def __call__(self) -> bool:
        return self.received is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; `signal.signal` calls this."""
        del frame
        if self.received is not None:
            raise KeyboardInterrupt
        self.received = number


def run_command(args: Sequence[str]) -> None:
    """Run the command that the arguments name."""
    check_flags(args)
    base = _base_config(args)
    if args[:1] == ["train"] and not {"-h", "--help"}.isdisjoint(args):
        print_safely(train_help(base))
        return
    _app(base, args).cli(
        prog="funcrl",
        description="RL post-training of language models as pure functions.",
        args=args,
        registry=NUMBERS,
    )


def _app(base: TrainConfig, args: Sequence[str]) -> SubcommandApp:
    """Return the commands; `base` holds the defaults of `funcrl train`."""
    app = SubcommandApp()
    # tyro would make an option of each name in a dictionary that is not empty.
    weights, base = base.reward_weights, replace(base, reward_weights={})
    shown, compiles = with_compile_options(base), switch_of(base, args)
    app.command(_bench(args), name="bench")
    _add_model_commands(app)

    @app.command(name="train")
    def _train(
        options: AvoidSubcommands[Annotated[TrainConfig, arg(name="")]] = shown,
        start: Annotated[StartConfig, arg(name="")] = StartConfig(),
        switch: Annotated[CompileSwitch, arg(name="")] = compiles,
    ) -> None:
        """Train a policy with reinforcement learning: the whole loop, on this machine."""
        # Their options are the defaults already: `_base_config` has read them.
        resume, trust = start.resume, start.trust
        file = start.config if resume is None else resume / runs.CONFIG
        options = replace(options, reward_weights=options.reward_weights or weights)
        options = with_switch("train", options, switch, args)
        if start.dry_run:
            print_safely(describe_run(options, resume, trust))
            return
        if file is not None:
            _check_code(options, file, resume, args, trust)
        _run(options, resume is not None, ["funcrl", *args])

    @app.command(name="report")
    def _report(
        runs_: Annotated[tuple[Path, ...], arg(name="runs")], /, out: Path | None = None
    ) -> None:
        """Write a page about a run, or one that compares several.

        Args:
            runs_: folders of runs.
            out: where a comparison goes: a folder, `comparison` beside the first run when left out.
        """
        print_safely(str(_write_report(runs_, out)))

    return app


def _add_model_commands(app: SubcommandApp) -> None:
    @app.command(name="eval")
    def _eval(
        config: Annotated[EvalConfig, arg(name="")] = EvalConfig(),
        trust: bool = False,
    ) -> None:
        """Print accuracy with its interval, pass@k and majority@k on held-out prompts.

        Args:
            config: what to evaluate, and how.
            trust: run the code that the run's folder names, such as a task of one's own, even if
                this account has not run it before or it has changed.
        """
        result = evaluate(config, trust=trust, note=partial(print_safely, file=sys.stderr))
        print_safely(format_evaluation(result))

    @app.command(name="parity")
    def _parity(config: Annotated[ParityConfig, arg(name="")] = ParityConfig()) -> None:
        """Compare a generator's log-probabilities with the trainer's; exit 1 if they differ."""
        result = parity(config)
        print_safely(json.dumps(result._asdict()) if config.json else format_parity(config, result))
        if not result.max_abs_diff <= config.limit:
            sys.exit(1)

    @app.command(name="export")
    def _export(run: Path, out: Path) -> None:
        """Write what a run has trained as a Hugging Face folder, or a .gguf file; run no task.

        Args:
            run: the folder of a run.
            out: where the model goes.
        """
        print_safely(str(export(run, out)))

    @app.command(name="models")
    def _models() -> None:
        """List the shapes and the pretrained weights that have a name."""
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


def _bench(args: Sequence[str]) -> SubcommandApp:
    bench = SubcommandApp()
    loop = LoopBenchConfig(train=with_compile_options(TrainConfig()))
    compiles = switch_of(TrainConfig(), args, "train.")

    @bench.command(name="step")
    def _step(config: Annotated[StepBenchConfig, arg(name="")] = StepBenchConfig()) -> None:
        """Print time and peak memory of one GRPO step beside the ordinary way of writing it."""
        print_safely(format_rows(bench_step(config)))

    @bench.command(name="generate")
    def _generate(
        config: Annotated[GenerateBenchConfig, arg(name="")] = GenerateBenchConfig(),
    ) -> None:
        """Print the speed of the embedded sampler beside transformers' generate()."""
        print_safely(format_rows(bench_generate(config)))

    @bench.command(name="vllm")
    def _vllm(config: Annotated[VLLMBenchConfig, arg(name="")] = VLLMBenchConfig()) -> None:
        """Print vLLM's speed in both forms beside plain vLLM, and what a push takes."""
        print_safely(format_rows(bench_vllm(config)))

    @bench.command(name="loop")
    def _loop(
        config: AvoidSubcommands[Annotated[LoopBenchConfig, arg(name="")]] = loop,
        switch: Annotated[CompileSwitch, arg(name="train")] = compiles,
    ) -> None:
        """Print the time of a training step and of its parts."""
        options = with_switch("bench loop", config.train, switch, args, "train.")
        print_safely(format_rows(bench_loop(replace(config, train=options))))

    return bench


def _base_config(args: Sequence[str]) -> TrainConfig:
    """Return the defaults of `funcrl train`: those of its run, its file or its model, if given."""
    run, file = _value(args, "--resume"), _value(args, "--config")
    if args[:1] != ["train"]:
        return TrainConfig()
    if run is None and file is None:
        model = _value(args, "--model")
        return TrainConfig() if model is None else defaults(model)
    if run is not None and file is not None:
        raise ValueError("train expects --resume or --config, got both.")
    if run is not None and _value(args, "--run-dir") is not None:
        raise ValueError("train expects --resume or --run-dir, got both.")
    path = Path(file) if file is not None else Path(str(run)) / runs.CONFIG
    config = read_config(TrainConfig, path)
    if {"--no-compile", "--no_compile"} & {*args}:  # nothing of the file's compilation applies
        config = replace(config, compile=None)
    return config if run is None else replace(config, run_dir=Path(run))


def _value(args: Sequence[str], name: str) -> str | None:
    """Return the value of an option before tyro reads the line, whose defaults depend on it."""
    found = []
    for place, text in enumerate(args):
        if text == name and place + 1 < len(args):
            found.append(args[place + 1])
        if text.startswith(f"{name}="):
            found.append(text.partition("=")[2])
    if len(found) > 1:
        raise ValueError(f"train expects {name} once, got {' and '.join(found)}.")
    return found[0] if found else None


def _run(config: TrainConfig, resume: bool, command: Sequence[str]) -> None:
    if config.run_dir is None:
        file = data_file(config.task)
        name = Path(config.task.rpartition(":")[2]).name if file is None else file.stem
        config = replace(config, run_dir=free_folder(Path("runs"), name))
    stop = _Stop()
    before = {each: signal.signal(each, stop.handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        view = view_for(sys.stdout)
        trained = run_training(
            config, view=view, resume=resume, command=command, stop=stop, trust=True
        )
    except KeyboardInterrupt:
        sys.exit(128 + (stop.received or signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    first, last = trained.history[0], trained.history[-1]
    if "eval/accuracy" in first and "eval/accuracy" in last:
        print_safely(f"accuracy {first['eval/accuracy']:.2f} -> {last['eval/accuracy']:.2f}")
    print_safely(f"funcrl report {config.run_dir} makes a page of it.")


def _check_code(
    config: TrainConfig, file: Path, run: Path | None, args: Sequence[str], trust: bool
) -> None:
    """Print which code a file names that the command line does not; raise if it must not run."""
    cache = config.compile.cache_dir if config.compile else None
    # What the command line names itself is the user's own choice.
    named = [each for each in named_code(config) if not _value(args, each.option.split()[0])]
    folder = None if _value(args, "--compile.cache-dir") else cache_code(cache)
    for line in check_trusted("train", [*named, folder], file, run, trust):
        print_safely(line, sys.stderr)
