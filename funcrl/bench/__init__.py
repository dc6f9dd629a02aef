"""Measured time and memory, each beside another way to do the same."""

from funcrl.bench.generate import (
    GenerateBenchConfig,
    GenerateRow,
    bench_generate,
    format_generate_rows,
)
from funcrl.bench.inputs import StepBenchConfig
from funcrl.bench.loop import LoopBenchConfig, LoopRow, bench_loop, format_loop_rows
from funcrl.bench.measure import Row, describe_machine, format_rows, measure, peak_bytes
from funcrl.bench.step import bench_step
from funcrl.bench.vllm import VLLMBenchConfig, VLLMRow, bench_vllm, format_vllm_rows

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
