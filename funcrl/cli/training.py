"""`funcrl train`: which run a line means, and how a signal stops it."""

import os
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from funcrl.cli.command_line import Line, StartConfig, with_values
from funcrl.cli.preview import describe_run
from funcrl.config import TrainConfig, read_config
from funcrl.core.text import print_safely
from funcrl.loop.opening import with_folder
from funcrl.loop.sources import defaults
from funcrl.loop.train import train as run_training
from funcrl.run import runs
from funcrl.run.accuracy import held_out, interval_of
from funcrl.run.folder import check_options_kept
from funcrl.run.trust import CODE_OPTIONS, check_file
from funcrl.run.views import view_for


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


def run_train(line: Line) -> None:
    """Run `funcrl train`."""
    base, values = base_config(line), line.values
    start: StartConfig = with_values(StartConfig(), values)
    options: TrainConfig = with_values(base, values)
    resume, parent = start.resume is not None, None
    if start.fork is not None:
        if start.resume is None:
            raise ValueError(f"train expects --resume RUN with --fork, got --fork {start.fork}.")
        resume, parent = False, start.resume
    elif start.resume is not None:
        check_options_kept("train", options, start.resume)
    if start.dry_run:
        print_safely(describe_run(options, start.resume, start.trust))
        return
    # What the command line names itself is the user's own choice.
    chosen = start.trust or [name for name in values if values[name]]
    file = start.config if start.resume is None else start.resume / runs.CONFIG
    if file is not None:
        for note in check_file("train", options, file, start.resume, trust=chosen):
            print_safely(note, sys.stderr)
    # What is checked here needs no second look; what a run in --model names does.
    _run(options, resume, parent, ["funcrl", "train", *line.args], start.trust or CODE_OPTIONS)


def base_config(line: Line) -> TrainConfig:
    """Return the defaults of `funcrl train`: those of its run, its file or its model, if given."""
    _check_given_once(line.args)
    run: Path | None = line.values.get("resume")
    file: Path | None = line.values.get("config")
    if run is None and file is None:
        model = line.values.get("model")
        return TrainConfig() if model is None else defaults(model)
    if run is not None and file is not None:
        raise ValueError("train expects --resume or --config, got both.")
    if run is not None and line.values.get("run-dir") is not None:
        raise ValueError("train expects --resume or --run-dir, got both.")
    path = file or Path(str(run)) / runs.CONFIG
    config = read_config(TrainConfig, path)
    return config if run is None else replace(config, run_dir=line.values.get("fork") or run)


def _check_given_once(args: Sequence[str]) -> None:
    """Raise if an option that says where the others come from is given twice."""
    names = [text.partition("=")[0].replace("_", "-") for text in args]
    for name in ("--resume", "--config", "--run-dir", "--model", "--task"):
        if names.count(name) > 1:
            raise ValueError(f"train expects {name} once, got it {names.count(name)} times.")


def _run(
    config: TrainConfig,
    resume: bool,
    fork: Path | None,
    command: Sequence[str],
    trust: bool | Sequence[str],
) -> None:
    stop = _Stop()
    before = {each: signal.signal(each, stop.handle) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        with with_folder(config) as config:  # named here, since the last line says its name
            view = view_for(sys.stdout)
            trained = run_training(
                config, view=view, resume=resume, fork=fork, command=command, stop=stop, trust=trust
            )
    except KeyboardInterrupt:
        _exit(128 + (stop.received or signal.SIGINT))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    first, last = trained.history[0], trained.history[-1]
    began, ended = held_out(first), held_out(last)
    if began is not None and ended is not None:
        (_, value), (name, reached) = began, ended
        print_safely(f"{name} {_evaluated(first, value)} -> {_evaluated(last, reached)}")
    print_safely(f"funcrl report {config.run_dir} makes a page of it.")


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
