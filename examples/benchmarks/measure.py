"""Time and memory of a call."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.table import Row, describe_machine
from funcrl import memory_profile, memory_stats, reset_peak, tree
from funcrl.core.types import Tree

Variants = dict[str, Callable[[], Any]]


def measure(
    what: str, shape: str, variants: Variants, repeats: int, device: str = "cpu"
) -> list[Row]:
    """Return a row for each variant; they take turns, so that a noisy moment hits all of them."""
    peaks = {name: peak_bytes(fn, device) for name, fn in variants.items()}  # warms up, too
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(repeats):
        for name, fn in variants.items():
            seconds[name].append(seconds_of(fn, device))
    return [
        summarize(what, shape, name, values, device, peaks[name])
        for name, values in seconds.items()
    ]


def summarize(
    what: str,
    shape: str,
    variant: str,
    seconds: Sequence[float],
    device: str = "cpu",
    peak: int | None = None,
    **numbers: float,
) -> Row:
    """Return the row of a variant that took these times."""
    quartiles = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else [0.0]
    return Row(
        what=what,
        shape=shape,
        variant=variant,
        median_s=statistics.median(seconds),
        spread_s=quartiles[-1] - quartiles[0],
        peak_bytes=peak,
        machine=describe_machine(device),
        numbers=numbers,
    )


def peak_bytes(fn: Callable[[], Any], device: str = "cpu") -> int:
    """Return the most bytes of tensors alive during the call beyond those alive before it."""
    fn()
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        before = reset_peak(device).allocated
        fn()
        torch.cuda.synchronize()
        return memory_stats(device).peak_allocated - before
    with memory_profile("peak_bytes", device, stacks=False) as memory:
        fn()
    return memory.result.peak_allocated - memory.result.start_allocated


def held_bytes(device: str) -> int:
    """Return the bytes that torch holds of the GPU after giving back what is free; 0 of a CPU."""
    gc.collect()
    if device != "cuda":
        return 0
    torch.cuda.empty_cache()
    return memory_stats(device).reserved


def timed(fn: Callable[[], Any], device: str) -> tuple[Any, float]:
    """Return a call's result and the seconds that it takes, its work on the device included."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = fn()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def seconds_of(fn: Callable[[], Any], device: str) -> float:
    """Return the seconds that a call takes, its work on the device included."""
    return timed(fn, device)[1]


def num_bytes(tensors: Tree) -> int:
    """Return the bytes of the tensors of a tree."""
    return sum(leaf.numel() * leaf.element_size() for leaf in tree.leaves(tensors))
