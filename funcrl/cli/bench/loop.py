"""Where the time of a training step goes: the whole loop, for real, in a folder that is dropped."""

import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from funcrl.cli.bench.measure import summarize
from funcrl.cli.bench.rows import Row, finish
from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig
from funcrl.core.arguments import Count, check_fields
from funcrl.loop.train import train

_PARTS = ("time/generate", "time/reward", "time/wait", "time/train", "time/push")


@dataclass(frozen=True)
class LoopBenchConfig:
    """Time of a training step and of its parts, and of the start."""

    steps: Count = 20
    """The number of measured steps, after two that warm up."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The run, as for `funcrl train`; its folder, steps, warm start and evaluation are the
    benchmark's own."""
    json: Path | None = None
    """The file that every row is written to as well."""

    def __post_init__(self) -> None:
        check_fields(self, "bench loop")


def bench_loop(config: LoopBenchConfig) -> list[Row]:
    """Return a row for the whole step, for each of its parts and for the start."""
    with tempfile.TemporaryDirectory() as folder:
        options = replace(
            config.train,
            run_dir=Path(folder) / "run",
            steps=config.steps + 2,
            warm_start=WarmStartConfig(steps=0),
            evaluation=EvaluationConfig(every=0),
            drop_zero_variance=False,  # an untrained policy earns nothing, and is to be timed
        )
        history = train(options).history
    device = options.device
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    shape = (
        f"{options.model}, {options.num_prompts} x {options.num_generations} samples, "
        f"{options.dtype}, {device}"
    )
    if options.max_staleness:
        shape += f", max staleness {options.max_staleness}"
    steps = history[3:]
    whole = [row["step_time"] for row in steps]
    speed = sum(row["num_tokens"] for row in steps) / sum(whole)
    rows = [summarize("step", shape, "step_time", whole, device, peak, tokens_per_s=speed)]
    for name in [each for each in _PARTS if each in steps[0]]:
        rows.append(summarize("step", shape, name, [row[name] for row in steps], device))
    rows.append(summarize("start", shape, "time/startup", [history[0]["time/startup"]], device))
    return finish(rows, config.json)
