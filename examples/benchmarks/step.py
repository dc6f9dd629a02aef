"""Time and memory of a step, beside the ordinary way of writing it."""

from collections.abc import Callable
from functools import partial
from typing import Any, get_args

import torch
from torch import nn

from benchmarks.baseline import with_weights
from benchmarks.compiled import gradient_rows, step_rows
from benchmarks.inputs import (
    Case,
    StepBenchConfig,
    depths,
    gradient_of,
    keep,
    make_case,
    sample_loss,
    scores_of,
)
from benchmarks.measure import Variants
from benchmarks.packed import packed_rows
from benchmarks.profiling import write_profile
from benchmarks.table import Row, finish
from funcrl import grads, grpo_step, optim, tree
from funcrl.config.sections import BaseDtype
from funcrl.core.types import Batch, Metrics, Params, TrainState
from funcrl.models.lora import Lora, lora, qlora
from funcrl.rl.backward import Gradient


def bench_step(config: StepBenchConfig) -> list[Row]:
    """Return a row for each variant and depth; prints nothing.

    Writes `config.json`, and files into the folder `config.profile`.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    results: list[Row] = []
    for num_layers in depths(config):
        case = make_case(config, num_layers)
        for part in config.parts:
            results += _PARTS[part](case)
        if config.profile is not None:
            write_profile(config.profile, f"{num_layers}-layers", case)
    return finish(results, config.json)


def _gradient_variants(case: Case) -> Variants:
    params, batch, loss_fn = case.params, case.batch, sample_loss(case)
    chunk = case.config.chunk
    functions = {
        "func: gradient of the batch": gradient_of(case),
        f"func: per-sample, {chunk} at a time": grads.summed_gradient(loss_fn, keep, chunk),
        "func: per-sample, all at once": grads.summed_gradient(loss_fn, keep),
    }

    def under_no_grad(fn: Callable[[Params, Batch], Gradient]) -> Callable[[], Any]:
        return lambda: torch.no_grad()(fn)(params, batch)  # as in a step

    return {"torch.autograd, batched": case.ordinary_gradient()} | {
        name: under_no_grad(fn) for name, fn in functions.items()
    }


def _update_variants(case: Case) -> Variants:
    params = case.params
    fixed = tree.map(lambda leaf: torch.full_like(leaf, 1e-3), params)
    module_leaves = [leaf.clone().requires_grad_() for leaf in tree.leaves(params)]
    in_place = torch.optim.AdamW(module_leaves, lr=1e-6, foreach=False)
    for leaf, grad in zip(module_leaves, tree.leaves(fixed), strict=True):
        leaf.grad = grad
    pure = optim.adamw(1e-6)
    guarded = optim.skip_nonfinite(pure)
    state, guarded_state = pure.init(params), guarded.init(params)

    def apply(tx: Any, tx_state: Any) -> Any:
        updates, new_state = tx.update(fixed, tx_state, params)
        return optim.apply_updates(params, updates), new_state

    return {
        "torch.optim.AdamW, in place": in_place.step,
        "optim.adamw, pure": lambda: apply(pure, state),
        "optim.skip_nonfinite(adamw), pure": lambda: apply(guarded, guarded_state),
    }


def _step_variants(case: Case) -> Variants:
    module = with_weights(case.model, case.params)
    leaves = list(module.parameters())
    optimizer = torch.optim.AdamW(leaves, lr=1e-6, foreach=False)
    step = grpo_step(case.model_fn)
    state = step.init(case.params)

    def ordinary() -> None:
        optimizer.zero_grad()
        case.ordinary_loss(module).backward()
        nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()

    def pure() -> tuple[TrainState, Metrics]:
        return step(state, case.batch)

    return {"torch.autograd and torch.optim": ordinary, "grpo_step": pure}


def _adapter_variants(case: Case) -> Variants:
    """Steps of adapters; what is peak memory is beside a base that is alive before and after."""

    def step_of(adapted: Lora) -> Callable[[], Any]:
        step = grpo_step(adapted.model_fn)
        state = step.init(adapted.init(0))
        return lambda: step(state, case.batch)

    dtype, score = case.dtype or torch.float32, partial(scores_of, case.config)
    return {"lora, any model function": step_of(lora(case.model_fn, case.params))} | {
        f"qlora, base in {name}": step_of(
            qlora(case.model, case.params, base_dtype=name, dtype=dtype, score=score)
        )
        for name in get_args(BaseDtype)
    }


_PARTS: dict[str, Callable[[Case], list[Row]]] = {
    "gradient": lambda case: case.measure("gradient", _gradient_variants(case)),
    "update": lambda case: case.measure("update", _update_variants(case)),
    "step": lambda case: case.measure("step", _step_variants(case)),
    "adapters": lambda case: case.measure("step of adapters", _adapter_variants(case)),
    "compiled-gradient": gradient_rows,
    "compiled-step": step_rows,
    "packed-step": packed_rows,
}
