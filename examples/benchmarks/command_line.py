"""The command line of the benchmarks."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, Union

import tyro

import benchmarks
from benchmarks.generate import GenerateBenchConfig, bench_generate
from benchmarks.inputs import StepBenchConfig
from benchmarks.loop import LoopBenchConfig, bench_loop
from benchmarks.numerics import NumericsBenchConfig, bench_numerics
from benchmarks.recurrent import bench_recurrent, format_recurrent
from benchmarks.rows import RowsBenchConfig, bench_rows
from benchmarks.scans import RecurrentBenchConfig
from benchmarks.step import bench_step
from benchmarks.table import format_columns, format_rows
from benchmarks.vllm import VLLMBenchConfig, bench_vllm
from funcrl.cli import read_train_config
from funcrl.core.printing import print_safely
from funcrl.core.process import ExplainedMemoryError


class Benchmark(NamedTuple):
    """What a word of the command line measures."""

    config: type[Any]
    measure: Callable[[Any], Sequence[Any]]
    format: Callable[[Sequence[Any]], str] = format_rows


BENCHMARKS = {
    "step": Benchmark(StepBenchConfig, bench_step),
    "generate": Benchmark(GenerateBenchConfig, bench_generate),
    "loop": Benchmark(LoopBenchConfig, bench_loop, format_columns),
    "numerics": Benchmark(NumericsBenchConfig, bench_numerics),
    "recurrent": Benchmark(RecurrentBenchConfig, bench_recurrent, format_recurrent),
    "rows": Benchmark(RowsBenchConfig, bench_rows),
    "vllm": Benchmark(VLLMBenchConfig, bench_vllm),
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the benchmark that the arguments name, and print its table.

    `--train.*` are the options of `funcrl train`, for the benchmark of the loop.
    """
    own, of_train = split_train_options(sys.argv[1:] if args is None else args)
    subcommands = [
        Annotated[each.config, tyro.conf.subcommand(name)] for name, each in BENCHMARKS.items()
    ]
    configs: Any = Union[tuple(subcommands)]  # noqa: UP007 (made of a table)
    config: Any = tyro.cli(configs, args=own, prog="benchmarks", description=benchmarks.__doc__)
    try:
        benchmark = next(each for each in BENCHMARKS.values() if isinstance(config, each.config))
        if of_train:
            if not isinstance(config, LoopBenchConfig):
                raise ValueError(
                    f"benchmarks expects {of_train[0]} with loop, got another command."
                )
            config = replace(config, train=read_train_config(of_train))
        print_safely(benchmark.format(benchmark.measure(config)))
    except (ValueError, OSError, ImportError, ExplainedMemoryError) as error:
        print_safely(f"benchmarks: {error}", sys.stderr)
        sys.exit(1)


def split_train_options(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments without `--train.*`, and those as `funcrl train` knows them."""
    own: list[str] = []
    of_train: list[str] = []
    into = own
    for text in args:
        if text.startswith("--"):
            into = of_train if text.startswith("--train.") else own
        into.append(text.replace("--train.", "--", 1) if into is of_train else text)
    return own, of_train
