"""Measured time and memory, each beside another way to do the same."""

from funcrl.cli.bench.generate import GenerateBenchConfig, bench_generate
from funcrl.cli.bench.inputs import StepBenchConfig
from funcrl.cli.bench.loop import LoopBenchConfig, bench_loop
from funcrl.cli.bench.measure import measure, peak_bytes
from funcrl.cli.bench.numerics import NumericsBenchConfig, bench_numerics
from funcrl.cli.bench.recurrent import bench_recurrent, format_recurrent
from funcrl.cli.bench.rows import Row, format_columns, format_rows
from funcrl.cli.bench.scans import RecurrentBenchConfig
from funcrl.cli.bench.step import bench_step
from funcrl.cli.bench.vllm import VLLMBenchConfig, bench_vllm

__all__ = [
    "GenerateBenchConfig",
    "LoopBenchConfig",
    "NumericsBenchConfig",
    "RecurrentBenchConfig",
    "Row",
    "StepBenchConfig",
    "VLLMBenchConfig",
    "bench_generate",
    "bench_loop",
    "bench_numerics",
    "bench_recurrent",
    "bench_step",
    "bench_vllm",
    "format_columns",
    "format_recurrent",
    "format_rows",
    "measure",
    "peak_bytes",
]
