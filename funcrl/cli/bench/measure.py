"""How time and memory are measured, and what is said about the machine."""

import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

Variants = dict[str, Callable[[], Any]]


class Row(NamedTuple):
    """One variant's measurement."""

    what: str
    shape: str
    variant: str
    median_s: float
    spread_s: float  # between the quartiles
    peak_bytes: int  # above what was allocated before the call
    time_ratio: float  # to the first variant of the same `what` and `shape`
    peak_ratio: float
    # Of a compiled variant:
    trace_s: float | None = None  # until there is a program to call
    first_call_s: float | None = None  # which compiles
    predicted_bytes: int | None = None  # the graph's peak, beyond its inputs


def measure(
    what: str, shape: str, variants: Variants, repeats: int, device: str = "cpu"
) -> list[Row]:
    """Return one row a variant: run in turns, so that a noisy moment hits all of them."""
    peaks = {name: peak_bytes(fn, device) for name, fn in variants.items()}  # warms up, too
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, fn in variants.items():
            seconds[name].append(seconds_of(fn, device))
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    first = next(iter(variants))
    rows = []
    for name, values in seconds.items():
        low, _, high = statistics.quantiles(values, n=4) if repeats > 1 else (0.0, 0.0, 0.0)
        rows.append(
            Row(
                what=what,
                shape=shape,
                variant=name,
                median_s=medians[name],
                spread_s=high - low,
                peak_bytes=peaks[name],
                time_ratio=medians[name] / medians[first],
                peak_ratio=peaks[name] / max(peaks[first], 1),
            )
        )
    return rows


def peak_bytes(fn: Callable[[], Any], device: str = "cpu") -> int:
    """Return the most bytes alive during the call beyond those alive before it.

    On the CPU from the allocator's own record of every allocation, so that it is exact.
    """
    fn()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        fn()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(
        activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True
    ) as recorded:
        result = fn()
    del result
    events = [
        event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def describe_machine(device: str = "cpu") -> dict[str, str]:
    """Return the versions and the machine that a measurement belongs to."""
    model = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    machine = f"{model}, {torch.get_num_threads()} threads"
    if device == "cuda":
        machine = torch.cuda.get_device_name()
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": machine,
        "date": time.strftime("%Y-%m-%d"),
    }


def format_rows(rows: list[Row], machine: dict[str, str]) -> str:
    """Return the rows as Markdown tables, one for each shape, headed by the machine."""
    lines = [", ".join(f"{name} {value}" for name, value in machine.items())]
    for shape in dict.fromkeys(row.shape for row in rows):
        own = [row for row in rows if row.shape == shape]
        compiled = any(row.trace_s is not None for row in own)
        more = " trace s | first call s | predicted MB |" if compiled else ""
        lines += ["", shape, "", f"| what | variant | ms | spread | x | peak MB | x |{more}"]
        lines.append("|---" * (10 if compiled else 7) + "|")
        lines += [_format_row(row, compiled) for row in own]
    return "\n".join(lines)


def _format_row(row: Row, compiled: bool) -> str:
    line = (
        f"| {row.what} | {row.variant} | {row.median_s * 1e3:.1f} "
        f"| {row.spread_s * 1e3:.1f} | {row.time_ratio:.2f} "
        f"| {row.peak_bytes / 1e6:.1f} | {row.peak_ratio:.2f} |"
    )
    if not compiled:
        return line
    if row.trace_s is None or row.first_call_s is None or row.predicted_bytes is None:
        return f"{line} | | |"
    return f"{line} {row.trace_s:.1f} | {row.first_call_s:.1f} | {row.predicted_bytes / 1e6:.1f} |"


def write_rows(path: Path | None, rows: Sequence[Any], device: str = "cpu") -> None:
    """Write every row with the machine and the versions that it belongs to, as JSON."""
    if path is not None:
        described = describe_machine(device)
        lines = [row._asdict() | described for row in rows]
        path.write_text(json.dumps(lines, indent=1) + "\n")


def seconds_of(fn: Callable[[], Any], device: str) -> float:
    """Return how long a call takes, its work on the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = fn()
    if device == "cuda":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    del result
    return elapsed
