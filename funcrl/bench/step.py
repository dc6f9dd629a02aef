"""Time and memory of a step, beside the ordinary way of writing it."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from funcrl import grads, optim, rng, tree
from funcrl.algorithms import grpo
from funcrl.bench.measure import Row, Variants, measure, write_rows
from funcrl.logprobs import logprob_fn
from funcrl.losses import policy_loss
from funcrl.models import Transformer, TransformerConfig, init_params
from funcrl.step import grpo_step
from funcrl.types import Batch, Metrics, Params, TrainState


@dataclass(frozen=True)
class StepBenchConfig:
    """Time and peak memory of one GRPO step and its parts, eager, beside torch.autograd."""

    num_layers: tuple[int, ...] = (2, 12)
    """One table for each depth."""
    width: int = 128
    """Of the residual stream; the MLP is three times as wide, a head a quarter."""
    vocab_size: int = 512
    """Number of tokens the model knows."""
    rows: int = 32
    """Samples in the batch."""
    length: int = 128
    """Tokens in a row; the first quarter is the prompt."""
    chunk: int = 4
    """Samples at a time in the chunked variants."""
    repeats: int = 20
    """Measured runs of each variant, in turns."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where to run."""
    threads: int | None = None
    """CPU threads; torch's default when left out."""
    json: Path | None = None
    """Also write every row here."""


def bench_step(config: StepBenchConfig) -> list[Row]:
    """Return a row for each variant and depth; prints nothing and writes `config.json`."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    results: list[Row] = []
    for num_layers in config.num_layers:
        params, batch, model = _inputs(config, num_layers)
        shape = (
            f"{num_layers} layers, width {config.width}, vocabulary {config.vocab_size}, "
            f"{config.rows} x {config.length} tokens, {_count(params) / 1e6:.2f}M parameters"
        )
        variants = {
            "gradient": _gradient_variants(config, params, batch, model),
            "update": _update_variants(params),
            "step": _step_variants(params, batch, model),
        }
        for what, functions in variants.items():
            results += measure(what, shape, functions, config.repeats, config.device)
    write_rows(config.json, results, config.device)
    return results


def _inputs(config: StepBenchConfig, num_layers: int) -> tuple[Params, Batch, Transformer]:
    model = Transformer(
        TransformerConfig(
            vocab_size=config.vocab_size,
            width=config.width,
            num_layers=num_layers,
            head_width=config.width // 4,
            mlp_width=3 * config.width,
        )
    )
    params = init_params(model, seed=0, device=config.device)
    shape = (config.rows, config.length)
    generator = rng.generator(0, num_layers)
    uniform = -math.log(config.vocab_size)  # about what the untrained policy gives a token
    mask = (torch.arange(config.length) >= config.length // 4).expand(shape)
    batch = Batch(
        tokens=torch.randint(config.vocab_size, shape, generator=generator),
        positions=torch.arange(config.length).expand(shape),
        mask=mask,
        behavior_logprobs=uniform + 0.1 * torch.randn(shape, generator=generator),
        advantages=torch.randn(config.rows, 1, generator=generator).expand(shape),
        token_weights=grpo().weight(mask),
    )
    return params, tree.map(lambda leaf: leaf.to(config.device).contiguous(), batch), model


def _gradient_variants(
    config: StepBenchConfig, params: Params, batch: Batch, model: Transformer
) -> Variants:
    algorithm, model_fn = grpo(), logprob_fn(model)

    def loss_fn(params: Params, sample: Any) -> tuple[Tensor, Metrics]:
        return policy_loss(algorithm, model_fn(params, sample), sample)

    def keep(per_sample: Any) -> Any:
        return per_sample

    chunk = config.chunk
    functions = {
        "func: gradient of the batch": grads.summed_gradient(loss_fn),
        f"func: per-sample, {chunk} at a time": grads.summed_gradient(loss_fn, keep, chunk),
        "func: per-sample, all at once": grads.summed_gradient(loss_fn, keep),
    }
    module = _with_weights(model, params)

    def ordinary() -> list[Tensor]:
        return list(torch.autograd.grad(_ordinary_loss(module, batch), list(module.parameters())))

    def under_no_grad(fn: Callable[[Params, Batch], grads.Gradient]) -> Callable[[], Any]:
        return lambda: torch.no_grad()(fn)(params, batch)  # as in a step

    return {"torch.autograd, batched": ordinary} | {
        name: under_no_grad(fn) for name, fn in functions.items()
    }


def _update_variants(params: Params) -> Variants:
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


def _step_variants(params: Params, batch: Batch, model: Transformer) -> Variants:
    module = _with_weights(model, params)
    leaves = list(module.parameters())
    optimizer = torch.optim.AdamW(leaves, lr=1e-6, foreach=False)
    step = grpo_step(logprob_fn(model))
    state = step.init(params)

    def ordinary() -> None:
        optimizer.zero_grad()
        _ordinary_loss(module, batch).backward()
        nn.utils.clip_grad_norm_(leaves, 1.0)
        optimizer.step()

    def pure() -> tuple[TrainState, Metrics]:
        return step(state, batch)

    return {"torch.autograd and torch.optim": ordinary, "grpo_step": pure}


def _with_weights(model: Transformer, params: Params) -> Transformer:
    """Return an ordinary module that holds a copy of the parameters."""
    module = Transformer(model.config)
    module.load_state_dict(
        {name: leaf.clone() for name, leaf in params.items()}, strict=False, assign=True
    )
    if model.config.tied:
        module.unembed.weight = module.embed.weight
    return module


def _ordinary_loss(module: Transformer, batch: Batch) -> Tensor:
    """The same loss and metrics on whole [B, T] tensors, as one writes it without transforms."""
    logits = module(batch.tokens, batch.positions)[:, :-1].float()
    log_softmax = torch.log_softmax(logits, dim=-1)
    logprobs = log_softmax.gather(-1, batch.tokens[:, 1:, None]).squeeze(-1)
    mask, behavior = batch.mask[:, 1:], batch.behavior_logprobs[:, 1:]
    ratio = torch.exp(logprobs - behavior)
    advantages = batch.advantages[:, 1:]
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    with torch.no_grad():
        entropy = -(log_softmax.exp() * log_softmax).sum(dim=-1)
        metrics = [entropy, (logprobs - behavior).abs(), ratio, (ratio > 1.2).float()]
        _ = [(values * mask).sum() for values in metrics]
    return -(batch.token_weights[:, 1:] * mask * objective).sum()


def _count(params: Params) -> int:
    return sum(leaf.numel() for leaf in params.values())
