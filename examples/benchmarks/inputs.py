"""The inputs of a benchmark of a step: its options, a model, parameters and a batch."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from benchmarks.baseline import ordinary_loss, with_weights
from benchmarks.measure import Variants, measure
from benchmarks.table import Row
from funcrl import CompileConfig, grpo, logprob_fn, policy_loss, rng, tree
from funcrl.core.arguments import Count, CountOrAll, Fraction, Natural, check_fields
from funcrl.core.types import Batch, Metrics, ModelFn, Params, Rows, Tree
from funcrl.graph.remat import RematName
from funcrl.loop.memory import num_params
from funcrl.models import Transformer, TransformerConfig, init_params, shape
from funcrl.ops import AttendFn, attend_causal, attend_flash, attend_flash_segments
from funcrl.ops.attention import attend_prompts
from funcrl.rl.aggregation import sequence_mean
from funcrl.rl.backward import AuxLossFn, Gradient
from funcrl.rl.blocks import score_gradient
from funcrl.rl.grads import PerSampleTransform

CompiledPart: TypeAlias = Literal["compiled-gradient", "compiled-step", "packed-step"]
Part: TypeAlias = Literal["gradient", "update", "step", "adapters", CompiledPart]
VariantName: TypeAlias = Literal["batch", "per-sample", "clipped", "donated"]


@dataclass(frozen=True)
class StepBenchConfig:
    """Time and peak memory of one GRPO step and its parts, eager and compiled, beside
    torch.autograd."""

    num_layers: tuple[Count, ...] = (2, 12)
    """The numbers of layers, each of which has a table of its own."""
    width: Count = 128
    """The width of the residual stream; the MLP is three times as wide, a head a quarter."""
    model: str | None = None
    """A shape by name, such as qwen3-0.6b, instead of num_layers and width."""
    vocab_size: Count = 512
    """The number of tokens in the vocabulary."""
    rows: Count = 32
    """The number of samples in the batch."""
    length: Count = 128
    """The number of tokens in a row."""
    prompt: Natural | None = None
    """The number of tokens in a prompt; a quarter of the row when left out."""
    group: Count = 1
    """The number of samples of a prompt."""
    padding: Fraction = 0.0
    """The share of tokens that are padding, because completions end early."""
    packings: tuple[Literal["none", "samples", "prefixes"], ...] = ("none", "samples", "prefixes")
    """The layouts that packed-step measures: none, a row for each sample; samples, packed rows;
    prefixes, packed rows with a prompt once for its group."""
    pack_length: Count | None = None
    """The number of tokens in a packed row; four times a sample's when left out."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype to compute in."""
    param_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the parameters and the optimizer's moments."""
    chunk: Count = 4
    """The number of samples at a time in the chunked variants."""
    logprob_chunk: CountOrAll | None = None
    """The number of tokens whose logits are alive at a time, or all: computed once and kept for the
    backward pass. When left out, torch's autograd keeps what each operation on them needs."""
    attend: Literal["native", "flash"] = "native"
    """How both sides attend: by products and a softmax, or by one kernel that keeps no scores."""
    numerics: Literal["native", "exact"] = "native"
    """The operations of funcrl's side: torch's fastest, or those whose rows stand alone."""
    parts: tuple[Part, ...] = ("gradient", "update", "step")
    """What is measured. adapters are steps of adapters of rank 8, on a base in each of its dtypes.
    A compiled part is one graph: of forward and backward, or of a whole step. packed-step is one
    such graph for each of packings."""
    compile: CompileConfig = field(default_factory=CompileConfig)
    """How the compiled parts, and the profile, are compiled."""
    variants: tuple[VariantName, ...] = ("batch", "per-sample", "clipped", "donated")
    """The variants of compiled parts: the gradient of the batch, the sum of per-sample gradients,
    the sum of clipped ones, and the batch's with the state updated in place. The profile is of the
    first of them."""
    remats: tuple[RematName, ...] = ()
    """The policies of recomputation that compiled parts are measured with, instead of
    compile.remat; a budget is halfway between the predicted peaks of none and full, unless
    compile.remat_budget is given."""
    profile: Path | None = None
    """The folder for a profile of the compiled step: a Chrome trace, a table of time by layer and
    kind of op, and a picture of memory."""
    repeats: Count = 20
    """The number of measured runs of each variant, which take turns."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    threads: Count | None = None
    """The number of CPU threads, torch's default when left out."""
    json: Path | None = None
    """The file that every row is written to as well."""

    def __post_init__(self) -> None:
        check_fields(self, "benchmarks step")
        if self.model is not None:
            shape(self.model, self.vocab_size)
            if (self.num_layers, self.width) != ((2, 12), 128):
                raise ValueError(
                    f"benchmarks step expects --model or --num-layers and --width, got model "
                    f"{self.model}, layers {self.num_layers} and width {self.width}."
                )
        if self.attend == "flash" and (self.device, self.dtype) == ("cuda", "float32"):
            raise ValueError(
                "benchmarks step expects --dtype bfloat16 with --attend flash on cuda, got float32."
            )
        if self.rows % self.group:
            raise ValueError(
                f"benchmarks step expects --group to divide --rows {self.rows}, got {self.group}."
            )
        if not 0 <= self.padding * self.length < self.length - prompt_length(self):
            raise ValueError(
                f"benchmarks step expects --padding below the share of completions, "
                f"1 - {prompt_length(self)} / {self.length}, got {self.padding}."
            )
        compiles = self.profile is not None or set(self.parts) & set(get_args(CompiledPart))
        if not compiles and (self.compile != CompileConfig() or self.remats):
            raise ValueError(
                f"benchmarks step expects --profile, or compiled-gradient, compiled-step or "
                f"packed-step among --parts, with --compile.* and --remats, got parts {self.parts}."
            )
        if compiles and not self.variants:
            raise ValueError("benchmarks step expects at least one of --variants, got none.")


class Case(NamedTuple):
    """One depth of a benchmark: everything that its variants share."""

    config: StepBenchConfig
    shape: str  # in words
    model: Transformer
    model_fn: ModelFn
    params: Params
    batch: Batch
    dtype: torch.dtype | None  # to compute in; the parameters' own when None
    ordinary_attend: AttendFn  # of the loss that funcrl is compared with

    def measure(self, what: str, variants: Variants) -> list[Row]:
        """Return a row for each variant, which take turns."""
        return measure(what, self.shape, variants, self.config.repeats, self.config.device)

    def ordinary_loss(self, module: Transformer, checkpointed: bool = False) -> Tensor:
        """Return the loss of the batch as one writes it without transforms."""
        chunk = self.config.logprob_chunk
        return ordinary_loss(
            module, self.batch, self.dtype, chunk, checkpointed, self.ordinary_attend
        )

    def ordinary_gradient(self, checkpointed: bool = False) -> Callable[[], list[Tensor]]:
        """Return a function that computes the gradient of that loss by torch.autograd."""
        module = with_weights(self.model, self.params)
        leaves = list(module.parameters())
        return lambda: list(torch.autograd.grad(self.ordinary_loss(module, checkpointed), leaves))


def with_vocabulary(name: str) -> TransformerConfig:
    """Return a named shape with the vocabulary of its published model, or one of 512 tokens."""
    sizes = {
        "smollm2-135m": 49_152, "qwen3-0.6b": 151_936, "qwen3.5-0.8b": 248_320,
        "gemma3-270m": 262_144, "gemma3-1b": 262_144,
    }  # fmt: skip
    return shape(name, sizes.get(name, 512))


def depths(config: StepBenchConfig) -> tuple[int, ...]:
    """Return the numbers of layers that are measured, one after another."""
    if config.model is None:
        return config.num_layers
    return (shape(config.model, config.vocab_size).num_layers,)


def make_case(config: StepBenchConfig, num_layers: int) -> Case:
    """Return parameters and a batch of the configured shape, on its device."""
    if config.model is not None:
        network = shape(config.model, config.vocab_size)
    else:
        network = TransformerConfig(
            vocab_size=config.vocab_size,
            width=config.width,
            num_layers=num_layers,
            head_width=config.width // 4,
            mlp_width=3 * config.width,
        )
    model = Transformer(replace(network, numerics=config.numerics))
    dtype = None if config.dtype == config.param_dtype else getattr(torch, config.dtype)
    params = init_params(
        model, seed=0, dtype=getattr(torch, config.param_dtype), device=config.device
    )
    words = (
        f"{num_layers} layers, width {network.width}, vocabulary {config.vocab_size}, "
        f"{config.rows} x {config.length} tokens, {num_params(network) / 1e6:.2f}M parameters"
    )
    if config.dtype != "float32" or config.param_dtype != "float32":
        words += f", {config.param_dtype} parameters, computed in {config.dtype}"
    flash = config.attend == "flash"
    if flash:
        words += ", flash attention"
    batch = _batch(config, num_layers)
    model_fn = scores_of(config, model, dtype)
    ordinary_attend = attend_prompts if flash else attend_causal
    return Case(config, words, model, model_fn, params, batch, dtype, ordinary_attend)


def scores_of(
    config: StepBenchConfig, model: nn.Module, dtype: torch.dtype | None = None
) -> ModelFn:
    """Return a network's scores as the options compute them, in a dtype or the parameters' own."""
    flash = config.attend == "flash"
    return logprob_fn(
        model,
        chunk=config.logprob_chunk,
        dtype=dtype,
        attend=attend_flash if flash else None,
        attend_segments=attend_flash_segments if flash else None,
    )


def sample_loss(case: Case) -> AuxLossFn:
    """Return the function whose gradients are measured: the loss of one sample, with metrics."""
    algorithm = grpo()

    def loss_fn(params: Params, sample: Any) -> tuple[Tensor, Metrics]:
        return policy_loss(algorithm, case.model_fn(params, sample), sample)

    return loss_fn


def gradient_of(
    case: Case, per_sample: PerSampleTransform | None = None
) -> Callable[[Params, Rows], Gradient]:
    """Return `(params, batch) -> Gradient` as `grpo_step` computes it."""
    return score_gradient(case.model_fn, partial(policy_loss, grpo()), per_sample)


def keep(per_sample: Tree) -> Tree:
    """Return per-sample gradients unchanged: a step with this transform computes them."""
    return per_sample


def prompt_length(config: StepBenchConfig) -> int:
    """Return the number of tokens in a prompt."""
    return config.length // 4 if config.prompt is None else config.prompt


def _completion_lengths(config: StepBenchConfig, generator: torch.Generator) -> Tensor:
    """Return [B, 1] lengths, evenly spread about the mean that leaves the padding asked for."""
    longest = config.length - prompt_length(config)
    mean = longest - config.padding * config.length
    low = max(2 * mean - longest, 1.0)
    evenly = torch.linspace(low, 2 * mean - low, config.rows, dtype=torch.float64, device="cpu")
    order = torch.randperm(config.rows, generator=generator, device="cpu")
    return evenly.round().to(torch.int64)[order, None]


def _batch(config: StepBenchConfig, seed: int) -> Batch:
    shape = (config.rows, config.length)
    generator = rng.generator(0, seed)
    uniform = -math.log(config.vocab_size)  # about what the untrained policy gives a token
    drawn: dict[str, Any] = {"generator": generator, "device": "cpu"}
    positions = torch.arange(config.length, device="cpu")
    tokens = torch.randint(config.vocab_size, shape, **drawn)
    prompt = prompt_length(config)
    tokens[:, :prompt] = tokens[:: config.group, :prompt].repeat_interleave(config.group, 0)
    mask = (positions >= prompt).expand(shape)
    if config.padding:
        mask = mask & (positions < prompt + _completion_lengths(config, generator))
    batch = Batch(
        tokens=tokens,
        positions=positions.expand(shape),
        mask=mask,
        behavior_logprobs=uniform + 0.1 * torch.randn(shape, dtype=torch.float32, **drawn),
        advantages=torch.randn(config.rows, 1, dtype=torch.float32, **drawn).expand(shape),
        token_weights=sequence_mean(mask),
    )
    return tree.map(lambda leaf: leaf.to(config.device).contiguous(), batch)
