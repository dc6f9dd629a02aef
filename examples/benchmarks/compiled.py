"""Rows of compiled steps: start-up, time, and the peak that was predicted beside the measured one.

One variant after another, each freed before the next: a compiled step holds memory of its own.
"""

import time
from dataclasses import replace

import torch

from benchmarks.inputs import Case, VariantName, gradient_of, keep
from benchmarks.measure import held_bytes, seconds_of
from benchmarks.table import Row
from funcrl import CompileConfig, grads, grpo_step, tree
from funcrl.core.types import Metrics, Params, Rows, Step, TrainState
from funcrl.graph import compile_step, donate, live_bytes, predict_peak, step_graph


def gradient_rows(case: Case) -> list[Row]:
    """Return rows of forward and backward alone: gradients in, no optimizer.

    With a policy of recomputation the first row, which the others are compared with, is ordinary
    autograd with every block under activation checkpointing.
    """
    variants = [name for name in case.config.variants if name != "donated"]
    policies = (case.config.compile.remat, *case.config.remats)
    rows = []
    if any(policy != "none" for policy in policies):
        rows += _ordinary_rows(case, checkpointed=True)
    for name in variants:
        step = gradient_step(case, name)
        for label, config in _configs(case, step):
            rows.append(
                compiled_row(case, case.batch, "gradient, compiled", name + label, step, config)
            )
    return rows + _ordinary_rows(case, checkpointed=False)


def step_rows(case: Case) -> list[Row]:
    """Return rows of whole steps; the first, which the others are compared with, is compiled."""
    rows = []
    for name in case.config.variants:
        step = whole_step(case, name)
        for label, config in _configs(case, step):
            rows.append(
                compiled_row(case, case.batch, "step, compiled", name + label, step, config)
            )
    step = grpo_step(case.model_fn)
    state = step.init(case.params)
    eager = {"grpo_step, eager": lambda: step(state, case.batch)}
    return rows + case.measure("step, compiled", eager)


def whole_step(case: Case, name: VariantName) -> Step:
    """Return the step of a variant, to compile."""
    step = grpo_step(case.model_fn, per_sample=_per_sample(name))
    return donate(step) if name == "donated" else step


def gradient_step(case: Case, name: VariantName) -> Step:
    """Return a step whose new parameters are the gradient: no optimizer, no moments."""
    gradient = gradient_of(case, _per_sample(name))

    def init(params: Params, seed: int = 0) -> TrainState:
        start = torch.full((), seed, device=tree.leaves(params)[0].device)
        return TrainState(params, (), start, start.clone())

    @torch.no_grad()
    def update(state: TrainState, batch: Rows) -> tuple[TrainState, Metrics]:
        found = gradient(state.params, batch)
        metrics = Metrics(sums={"loss": found.loss}, means={}, maxes={}, last={})
        return state._replace(params=found.grads), metrics

    return Step(init, update)


def _per_sample(name: VariantName) -> grads.PerSampleTransform | None:
    if name == "clipped":
        return grads.clip_per_sample(1.0)
    return keep if name == "per-sample" else None


def _configs(case: Case, step: Step) -> list[tuple[str, CompileConfig]]:
    """Return each configuration to compile with, and what it adds to a variant's name."""
    config = case.config.compile
    if not case.config.remats:
        return [("", config)]
    configs = []
    for remat in case.config.remats:
        budget = 0
        if remat == "budget":
            budget = config.remat_budget or _halfway(case, step, config)
        configs.append((f", remat {remat}", replace(config, remat=remat, remat_budget=budget)))
    return configs


def _halfway(case: Case, step: Step, config: CompileConfig) -> int:
    """Return the bytes in the middle of the predicted peaks with everything kept, and nothing."""
    state = step.init(case.params)
    none, full = (
        predict_peak(step_graph(step, state, case.batch, replace(config, remat=remat)))
        for remat in ("none", "full")
    )
    return (none + full) // 2


def compiled_row(
    case: Case, batch: Rows, what: str, name: str, step: Step, config: CompileConfig
) -> Row:
    """Return the row of a step on a batch, from its trace to its last measured call."""
    device, state = case.config.device, step.init(case.params)
    before = held_bytes(device)
    start = time.perf_counter()
    graph = step_graph(step, state, batch, config)
    fast = compile_step(step, state, batch, config, graph)
    trace_s = time.perf_counter() - start

    # A donated state is written into, so that the same tensors are the next call's state.
    def call() -> tuple[TrainState, Metrics]:
        return fast(state, batch)

    first_call_s = seconds_of(call, device)
    # A CUDA graph's memory stays with it: a replay allocates its copied results alone.
    held = held_bytes(device) - before if config.cudagraph == "full" else 0
    (row,) = case.measure(what, {name: call})
    start_up = {
        "trace_s": trace_s,
        "first_call_s": first_call_s,
        "predicted_bytes": predict_peak(graph) - live_bytes(graph)[0],
    }
    return row._replace(peak_bytes=max(row.peak_bytes or 0, held), numbers=start_up)


def _ordinary_rows(case: Case, checkpointed: bool) -> list[Row]:
    name = "torch.autograd, each block checkpointed" if checkpointed else "torch.autograd, batched"
    return case.measure("gradient, compiled", {name: case.ordinary_gradient(checkpointed)})
