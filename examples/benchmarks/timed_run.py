"""One run of the loop in a process of its own, timed from before its interpreter starts."""

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.table import describe_machine
from funcrl import memory_stats, train
from funcrl.config import TrainConfig
from funcrl.core.process import ExplainedMemoryError
from funcrl.run.runs import Completion, Row
from funcrl.run.views import SilentView
from funcrl.tasks import Task


class Timed(NamedTuple):
    """A run that was timed."""

    ends: Sequence[float]  # seconds from before its process began to the end of each step
    history: Sequence[dict[str, Any]]  # the metrics of each step
    peak_bytes: int  # of the GPU, all its processes together; without one, of the run's process
    machine: dict[str, str]


class _Clock(SilentView):
    """A view that writes down when each step ended, and the memory of the GPU by then."""

    def __init__(self, device: str) -> None:
        self.ends: list[float] = []
        self.most_used = 0
        self._device = device

    def step(self, row: Row, completion: Completion | None) -> None:
        """Note a step's end."""
        del row, completion
        self.ends.append(time.monotonic())
        if self._device == "cuda":
            free, total = torch.cuda.mem_get_info()
            self.most_used = max(self.most_used, total - free)


def time_alone(config: TrainConfig, task: Task | None, name: str) -> Timed:
    """Return the times of a run in a new process.

    Args:
        config: the run's; its folder is a temporary one.
        task: in place of the one that the configuration names.
        name: of the run, for errors.
    """
    spawn = multiprocessing.get_context("spawn")
    started = time.monotonic()  # a clock that all processes of a machine share
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        try:
            return pool.submit(_time, config, task, started).result()
        except BrokenProcessPool as error:
            raise ExplainedMemoryError(
                f"benchmarks loop's variant {name!r} was killed, perhaps for memory."
            ) from error


def _time(config: TrainConfig, task: Task | None, started: float) -> Timed:
    """Run the loop, in the process that is timed."""
    clock = _Clock(config.device)
    with tempfile.TemporaryDirectory() as folder:
        options = replace(config, run_dir=Path(folder) / "run")
        history = train(options, task=task, view=clock).history
    return Timed(
        ends=[end - started for end in clock.ends],
        history=[row for row in history if row["step"]],
        peak_bytes=max(clock.most_used, memory_stats(config.device).peak_reserved),
        machine=describe_machine(config.device) | _engine_version(config.generator),
    )


def _engine_version(generator: str) -> dict[str, str]:
    """Return the version of vLLM, where it has generated."""
    if generator != "vllm":
        return {}
    import vllm

    return {"vllm": vllm.__version__}
