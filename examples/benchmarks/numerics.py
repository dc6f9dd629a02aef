"""What exact numerics cost: each part of a training step with native and with exact operations."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from benchmarks.compiled import gradient_step
from benchmarks.inputs import Case, StepBenchConfig, make_case
from benchmarks.table import Row, finish
from funcrl import CompileConfig, collate, compile_step, grpo, grpo_step, tree
from funcrl.core.arguments import Count, check_fields
from funcrl.core.types import Params, Rollout, Step
from funcrl.generators import Sampler, Sampling
from funcrl.generators.embedded.cache import CachedTransformer
from funcrl.generators.packed import pack_weights
from funcrl.models import SHAPES

NumericsPart: TypeAlias = Literal["decode", "gradient", "step", "loop"]


@dataclass(frozen=True)
class NumericsBenchConfig:
    """Time and memory of exact numerics beside native ones, which take turns."""

    model: str = "micro"
    """A shape by name, such as qwen3-0.6b, with random weights."""
    vocab_size: Count = 512
    """The number of tokens in the vocabulary."""
    rows: Count = 16
    """The number of samples that are trained on."""
    length: Count = 128
    """The number of tokens in a row; the first quarter is the prompt."""
    samples: Count = 128
    """The number of samples that one token each is generated for in the part decode."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype to compute in."""
    attend: Literal["native", "flash"] = "native"
    """The attention of native numerics in training."""
    logprob_chunk: Count = 1024
    """The number of tokens whose logits are alive at a time."""
    compiled: bool = False
    """Compile the trainer's parts; without it they run as they are written."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """How the trainer's parts are compiled."""
    parts: tuple[NumericsPart, ...] = ("decode", "gradient", "step", "loop")
    """decode: one token of each sample, on a GPU replayed as a CUDA graph; gradient: forward and
    backward; step: the whole update; loop: completions are drawn, and the update."""
    repeats: Count = 10
    """The number of measured runs of each variant, which take turns."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    threads: Count | None = None
    """The number of CPU threads, torch's default when left out."""
    json: Path | None = None
    """The file that every row is written to as well."""

    def __post_init__(self) -> None:
        check_fields(self, "benchmarks numerics")
        if self.model not in SHAPES:
            raise ValueError(
                f"benchmarks numerics expects --model to be one of {', '.join(SHAPES)}, got "
                f"{self.model!r}."
            )


def bench_numerics(config: NumericsBenchConfig) -> list[Row]:
    """Return a row for each part with native and with exact numerics; prints nothing."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    rows: list[Row] = []
    for part in config.parts:
        cases = {name: _case(config, name) for name in ("native", "exact")}
        variants = {name: _PARTS[part](config, case) for name, case in cases.items()}
        rows += cases["native"].measure(part, variants)
    return finish(rows, config.json)


def _case(config: NumericsBenchConfig, numerics: Literal["native", "exact"]) -> Case:
    return make_case(
        StepBenchConfig(
            model=config.model,
            vocab_size=config.vocab_size,
            rows=config.rows,
            length=config.length,
            dtype=config.dtype,
            logprob_chunk=config.logprob_chunk,
            attend=config.attend if numerics == "native" else "native",
            numerics=numerics,
            repeats=config.repeats,
            device=config.device,
        ),
        SHAPES[config.model].num_layers,
    )


def _update(config: NumericsBenchConfig, case: Case, step: Step) -> Callable[[], Any]:
    """Return a call of a step, compiled if the configuration says how."""
    state = step.init(case.params)
    if config.compiled:
        step = compile_step(step, state, case.batch, config.compile)
    return lambda: step(state, case.batch)


def _decode(config: NumericsBenchConfig, case: Case) -> Callable[[], Any]:
    """Return a call that extends each sample by one token, the last that a row has room for."""
    with torch.inference_mode():
        network = pack_weights(case.model, _computed(config, case.params))
        cache = CachedTransformer(network, config.samples, config.length)
        tokens = torch.arange(config.samples, device=config.device) % config.vocab_size
        positions = torch.full_like(tokens, config.length - 1)

        def extend() -> Any:
            with torch.inference_mode():
                return cache.decode(tokens, positions, config.length - 1)

        return _captured(extend) if config.device == "cuda" else extend


def _captured(fn: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that replays a function's kernels as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            fn()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = fn()

    def replay() -> Any:
        graph.replay()
        return result

    return replay


def _loop(config: NumericsBenchConfig, case: Case) -> Callable[[], Any]:
    """Return a call that draws completions with the parameters, and trains on them."""
    step = grpo_step(case.model_fn)
    state = step.init(case.params)
    if config.compiled:
        step = compile_step(step, state, case.batch, config.compile)
    dtype = getattr(torch, config.dtype)
    sampler = Sampler(case.model, dtype=dtype, slots=config.rows)
    prompt = config.length // 4
    group = next(size for size in (8, 4, 2, 1) if config.rows % size == 0)
    prompts = case.batch.tokens[::group, :prompt].tolist()
    sampling = Sampling(group, max_tokens=config.length - prompt)
    rewards = torch.arange(config.rows, device=config.device, dtype=torch.float32) % 2

    def run() -> Any:
        sampler.push(state.params)
        samples = sampler.generate(prompts, sampling, seed=0)
        mask = case.batch.mask
        behavior = torch.zeros(mask.shape, dtype=torch.float32, device=config.device)
        behavior[:, prompt:] = samples.logprobs
        tokens = case.batch.tokens.clone()
        tokens[:, :prompt] = tokens[::group, :prompt].repeat_interleave(group, dim=0)
        tokens[:, prompt:] = samples.tokens
        rollout = Rollout(
            tokens=tokens,
            mask=mask,
            behavior_logprobs=behavior,
            rewards=rewards,
            group=torch.arange(config.rows, device=config.device) // group,
            policy_version=torch.zeros(config.rows, dtype=torch.int64, device=config.device),
        )
        return step(state, collate(rollout, grpo()))

    return run


def _computed(config: NumericsBenchConfig, params: Params) -> Params:
    cast: Params = tree.cast(params, getattr(torch, config.dtype))
    return cast


_PARTS: dict[str, Callable[[NumericsBenchConfig, Case], Callable[[], Any]]] = {
    "decode": _decode,
    "gradient": lambda config, case: _update(config, case, gradient_step(case, "batch")),
    "step": lambda config, case: _update(config, case, grpo_step(case.model_fn)),
    "loop": _loop,
}
