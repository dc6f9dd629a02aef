"""A profile of a compiled step: a Chrome trace, a table by layer and kind, a picture of memory."""

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.profiler import ProfilerActivity, profile

from benchmarks.compiled import whole_step
from benchmarks.inputs import Case
from benchmarks.nodes import PHASES, format_times, phase_of, time_nodes
from benchmarks.table import describe, describe_machine
from funcrl.core.types import Step, TrainState
from funcrl.graph import compile_step, live_bytes, step_graph
from funcrl.graph.nodes import origin_of
from funcrl.run.report.plots import COLORS

_REPEATS = 3  # runs of the graph, node by node


def write_profile(folder: Path, name: str, case: Case) -> None:
    """Write `NAME.trace.json`, `NAME.table.md` and `NAME.memory.png` into a folder.

    Of the first of `case.config.variants`, compiled as `case.config.compile` says.
    """
    folder.mkdir(parents=True, exist_ok=True)
    variant, config = case.config.variants[0], case.config.compile
    step = whole_step(case, variant)
    state = step.init(case.params)
    graph = step_graph(step, state, case.batch, config)
    draw_memory(graph, folder / f"{name}.memory.png")
    times = time_nodes(graph, (state, case.batch), _REPEATS, case.config.device)
    head = (
        f"# {variant} step, {case.shape}\n\n"
        f"{describe(describe_machine(case.config.device))}\n\n"
        f"Milliseconds of each node of the graph (fuse {config.fuse}, remat {config.remat}), run "
        f"alone and in order, the median of {_REPEATS} runs, Python and launches included. This "
        f"is the graph before the backend: backend {config.backend}, cudagraph "
        f"{config.cudagraph}, as they run, are in {name}.trace.json.\n\n"
    )
    (folder / f"{name}.table.md").write_text(head + format_times(times) + "\n")
    fast = compile_step(step, state, case.batch, config, graph)
    _write_trace(folder / f"{name}.trace.json", case, fast, state)


def draw_memory(gm: fx.GraphModule, path: Path) -> Any:
    """Draw the bytes alive while each node runs, its phases shaded, and return the figure.

    The picture's metadata says its peak in bytes, under "Comment".
    """
    from matplotlib.figure import Figure

    live = live_bytes(gm)
    peak = max(live)
    figure = Figure(figsize=(8.0, 4.0), layout="constrained")
    axes = figure.subplots()
    axes.plot(range(len(live)), [count / 1e6 for count in live], color="black", linewidth=1.0)
    _shade(axes, [phase_of(node) for node in gm.graph.nodes])
    axes.axhline(live[0] / 1e6, color="black", linewidth=0.8, linestyle=":", label="inputs")
    place = live.index(peak)
    node = list(gm.graph.nodes)[place]
    where = origin_of(node).module or "outside the model"
    axes.plot([place], [peak / 1e6], "o", color="black", markersize=4)
    axes.set_title(f"peak {peak / 1e6:,.1f} MB at {node.name} ({where})", fontsize=9)
    axes.set_xlim(0, len(live) - 1)
    axes.set_ylim(0, 1.05 * peak / 1e6)
    axes.set_xlabel("node of the graph")
    axes.set_ylabel("MB alive (predicted)")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    figure.savefig(path, dpi=150, metadata={"Comment": f"peak_bytes {peak}"})
    return figure


def _shade(axes: Any, phases: Sequence[str]) -> None:
    colors = dict(zip(PHASES, COLORS, strict=False))
    start, named = 0, set()
    for phase, group in groupby(phases):
        end = start + len(list(group))
        if phase in colors:
            label = None if phase in named else phase
            axes.axvspan(start - 0.5, end - 0.5, color=colors[phase], alpha=0.25, lw=0, label=label)
            named.add(phase)
        start = end


def _write_trace(path: Path, case: Case, fast: Step, state: TrainState) -> None:
    """Record one call of the compiled step, after two that warm it up."""
    activities = [ProfilerActivity.CPU]
    if case.config.device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    for _ in range(2):
        fast(state, case.batch)
    with profile(activities=activities, acc_events=True) as recorded:
        fast(state, case.batch)
        if case.config.device == "cuda":
            torch.cuda.synchronize()
    recorded.export_chrome_trace(str(path))
