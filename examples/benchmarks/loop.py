"""Where the time of a training step goes: the whole loop, for real, a process for each variant."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import tyro

from benchmarks.measure import summarize
from benchmarks.table import Row, finish
from benchmarks.timed_run import Timed, time_alone
from benchmarks.variants import changed, check_names, check_runs_here
from benchmarks.workloads import (
    WARM_STEPS,
    WORKLOADS,
    RandomPrompts,
    Workload,
    as_train_config,
    options_of,
)
from funcrl.config import CheckpointConfig, EvaluationConfig, TrainConfig, WarmStartConfig
from funcrl.core.arguments import Count, check_fields
from funcrl.models import shape
from funcrl.tasks import Task

_STEPS = 20  # that are measured, where no workload says it
# The parts of a step that a run times; one that it does not have is no line of the table.
_PARTS = ("generate", "reward", "train", "push", "wait")
_OF_WORKLOADS = (
    "model", "vocab_size", "num_prompts", "num_generations", "prompt_tokens", "max_tokens",
)  # fmt: skip


@dataclass(frozen=True)
class LoopBenchConfig:
    """Time of a training step and of its parts, of the start, and peak memory, a column for each
    variant."""

    workload: Literal["grpo-128x256", "seed"] | None = None
    """A reference workload of random weights and prompts, in place of a run as --train.* says:
    grpo-128x256 has 16 prompts x 8 samples of 128 + 256 tokens, seed ten steps of 5 x 8 of 128 +
    100."""
    variants: tuple[str, ...] = ("given",)
    """The columns, each a run in a process of its own: given (as --train.* says), or one or more of
    eager, traced, compiled, graphs (the trainer) and sampler, native, unified (the generator; the
    last two are vLLM's forms), joined by +, such as graphs+native."""
    steps: Count | None = None
    """The number of measured steps, after two that warm up; when left out 20, 10 of grpo-128x256,
    and 8 of seed."""
    model: str | None = None
    """A shape in place of the workload's."""
    vocab_size: Count | None = None
    """The number of tokens in the vocabulary, in place of the workload's."""
    num_prompts: Count | None = None
    """The number of prompts of a step, in place of the workload's."""
    num_generations: Count | None = None
    """The number of samples of each prompt, in place of the workload's."""
    prompt_tokens: Count | None = None
    """The number of tokens of each prompt, in place of the workload's."""
    max_tokens: Count | None = None
    """The number of tokens of each completion, in place of the workload's."""
    train: tyro.conf.Suppress[TrainConfig] = field(default_factory=TrainConfig)
    """The run, whose options are those of `funcrl train` after --train, such as --train.packing;
    its folder, steps, warm start, evaluation and checkpoints are the benchmark's own, and with a
    workload whatever that says."""
    json: Path | None = None
    """The file that every row is written to as well."""

    def __post_init__(self) -> None:
        check_fields(self, "benchmarks loop")
        for variant in self.variants:
            check_names(variant)
        given = [name for name in _OF_WORKLOADS if getattr(self, name) is not None]
        if self.workload is None:
            if given:
                raise ValueError(
                    f"benchmarks loop expects --workload with --{given[0].replace('_', '-')}, got "
                    f"none; --train.* are the options of another run."
                )
            return
        if self.model is not None:
            shape(self.model, self.vocab_size or 512)
        usual = TrainConfig()
        for name in [*options_of(self.sizes(), self.train), "steps", "compile", "generator"]:
            if getattr(self.train, name) != getattr(usual, name):
                raise ValueError(
                    f"benchmarks loop expects no --train.{name.replace('_', '-')} with --workload, "
                    f"which says it, or --variants; got {getattr(self.train, name)}."
                )

    def sizes(self) -> Workload:
        """Return the workload, with the sizes that are given in place of its own."""
        own = {name: getattr(self, name) for name in _OF_WORKLOADS}
        return WORKLOADS[self.workload or "seed"]._replace(
            **{name: value for name, value in own.items() if value is not None}
        )


def bench_loop(config: LoopBenchConfig) -> list[Row]:
    """Return a row for each part of a step, for the whole step and for the start of each variant.

    Raises before any of them runs if this machine cannot run one.
    """
    options, task, words = _plan(config)
    for variant in config.variants:
        check_runs_here(variant, options)
    rows = []
    for variant in config.variants:
        timed = time_alone(changed(variant, options), task, variant)
        rows += _rows(f"{words}, {options.dtype}, {options.device}", variant, timed)
    return finish(rows, config.json)


def _plan(config: LoopBenchConfig) -> tuple[TrainConfig, Task | None, str]:
    """Return the run that every variant changes, the task in place of its own, and its words."""
    if config.workload is not None:
        sizes = config.sizes()
        options = as_train_config(sizes, config.train)
        steps = config.steps or sizes.steps
        return replace(options, steps=steps + WARM_STEPS), RandomPrompts(sizes), str(sizes)
    options = replace(
        config.train,
        steps=(config.steps or _STEPS) + WARM_STEPS,
        warm_start=WarmStartConfig(steps=0),
        evaluation=EvaluationConfig(every=0),
        checkpoint=CheckpointConfig(every=0),
        drop_zero_variance=False,  # an untrained policy earns nothing, and is to be timed
    )
    words = f"{options.model}, {options.num_prompts} x {options.num_generations} samples"
    return options, None, words


def _rows(words: str, variant: str, timed: Timed) -> list[Row]:
    """Return the rows of a variant: its start, its steps and their parts."""
    ends = timed.ends
    whole = [end - before for before, end in pairwise(ends)][WARM_STEPS - 1 :]
    steps = timed.history[WARM_STEPS:]
    speed = statistics.mean(row["num_tokens"] for row in steps) / statistics.median(whole)

    def row(what: str, seconds: Sequence[float], **others: Any) -> Row:
        return summarize(what, words, variant, seconds, **others)._replace(machine=timed.machine)

    parts = [part for part in _PARTS if f"time/{part}" in steps[0]]
    return [
        row("start to end of step 1", ends[:1]),
        row(f"start to end of step {len(ends)}", ends[-1:]),
        row("step", whole, peak=timed.peak_bytes, tokens_per_s=speed),
        *(row(part, [each[f"time/{part}"] for each in steps]) for part in parts),
    ]
