"""Measured time and memory, each beside another way to do the same."""

from funcrl.cli.bench.generate import (
    GenerateBenchConfig,
    GenerateRow,
    bench_generate,
    format_generate_rows,
)
from funcrl.cli.bench.inputs import StepBenchConfig
from funcrl.cli.bench.loop import LoopBenchConfig, LoopRow, bench_loop, format_loop_rows
from funcrl.cli.bench.measure import Row, describe_machine, format_rows, measure, peak_bytes
from funcrl.cli.bench.step import bench_step
from funcrl.cli.bench.vllm import VLLMBenchConfig, VLLMRow, bench_vllm, format_vllm_rows

__all__ = [
    "GenerateBenchConfig",
    "GenerateRow",
    "LoopBenchConfig",
    "LoopRow",
    "Row",
    "StepBenchConfig",
    "VLLMBenchConfig",
    "VLLMRow",
    "bench_generate",
    "bench_loop",
    "bench_step",
    "bench_vllm",
    "describe_machine",
    "format_generate_rows",
    "format_loop_rows",
    "format_rows",
    "format_vllm_rows",
    "measure",
    "peak_bytes",
]
