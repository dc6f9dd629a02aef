"""Where the time of a training step goes: the whole loop, for real, in a folder that is dropped."""

import statistics
import tempfile
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from funcrl.cli.bench.measure import describe_machine, write_rows
from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig
from funcrl.core import checks
from funcrl.core.arguments import check_fields
from funcrl.loop.train import train

_PARTS = ("step_time", "time/generate", "time/reward", "time/train", "time/push")


@dataclass(frozen=True)
class LoopBenchConfig:
    """Time of a training step and of its parts, and of the start."""

    steps: int = 20
    """The number of measured steps, after two that warm up."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """What to run, as for `funcrl train`; its folder, steps, warm start and evaluation are the
    benchmark's own."""
    json: Path | None = None
    """A file to write every row to as well."""

    def __post_init__(self) -> None:
        check_fields(self)
        checks.check_count("bench loop", "steps", self.steps)


class LoopRow(NamedTuple):
    """One part of a step."""

    what: str
    shape: str
    variant: str
    median_s: float
    spread_s: float  # between the quartiles
    share: float  # of the step
    tokens_per_s: float  # trained tokens, of the whole step


def bench_loop(config: LoopBenchConfig) -> list[LoopRow]:
    """Return a row for each part of a step; prints nothing."""
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
    steps = history[3:]
    whole = sum(row["step_time"] for row in steps)
    speed = sum(row["num_tokens"] for row in steps) / whole
    shape = (
        f"{options.model}, {options.num_prompts} x {options.num_generations} samples, "
        f"{options.dtype}, {options.device}"
    )
    rows = []
    for name in _PARTS:
        values = [row[name] for row in steps]
        low, median, high = statistics.quantiles(values, n=4)
        share = sum(values) / whole
        rows.append(LoopRow("loop", shape, name, median, high - low, share, speed))
    start = history[0]["time/startup"]
    rows.append(LoopRow("loop", shape, "time/startup", start, 0.0, 0.0, speed))
    write_rows(config.json, rows, options.device)
    return rows


def format_loop_rows(rows: list[LoopRow], device: str = "cpu") -> str:
    """Return the rows as a Markdown table, headed by the machine."""
    described = describe_machine(device)
    lines = [", ".join(f"{name} {value}" for name, value in described.items()), ""]
    lines += [f"{rows[0].shape}: {rows[0].tokens_per_s:,.0f} trained tokens/s", ""]
    lines += ["| part | ms | spread | share |", "|---|---|---|---|"]
    lines += [
        f"| {row.variant} | {1e3 * row.median_s:.1f} | {1e3 * row.spread_s:.1f} "
        f"| {100 * row.share:.0f}% |"
        for row in rows
    ]
    return "\n".join(lines)
