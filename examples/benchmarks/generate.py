"""Speed of the embedded sampler, beside transformers' generate() with the same weights."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

from benchmarks.inputs import with_vocabulary
from benchmarks.measure import Variants, measure, num_bytes, seconds_of
from benchmarks.table import Row, finish
from funcrl import rng
from funcrl.core.arguments import Count, check_fields
from funcrl.core.types import Params
from funcrl.generators import Sampler, Sampling
from funcrl.generators.embedded.captured import captured_runs
from funcrl.loop.memory import num_params
from funcrl.models import Transformer, TransformerConfig, init_params
from funcrl.ops import NATIVE
from funcrl.weights import translate

VariantName: TypeAlias = Literal["transformers", "sampler", "groups", "call-by-call"]

_GROUP = 8


@dataclass(frozen=True)
class GenerateBenchConfig:
    """Tokens a second of the embedded sampler, beside transformers' generate() and the floor."""

    shapes: tuple[str, ...] = ("tiny", "smollm2-135m")
    """The names of the models; "tiny" has 4 layers."""
    batches: tuple[Count, ...] = (1, 8, 32)
    """The numbers of samples that are generated at a time."""
    dtypes: tuple[Literal["float32", "bfloat16"], ...] = ("float32", "bfloat16")
    """The dtypes to compute in."""
    prompt_tokens: Count = 32
    """The number of tokens of a prompt."""
    max_tokens: Count = 64
    """The number of tokens of a completion; none ends earlier."""
    variants: tuple[VariantName, ...] = ("transformers", "sampler", "groups")
    """What draws. transformers: its generate(); sampler: one sample of each prompt; groups: eight
    samples of each prompt; call-by-call: the sampler without the CUDA graphs that it has in half
    precision on a GPU. Without transformers, shapes keep their norms of queries and keys."""
    repeats: Count = 3
    """The number of measured runs of each variant, which take turns."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    threads: Count | None = None
    """The number of CPU threads, torch's default when left out."""
    json: Path | None = None
    """The file that every row is written to as well."""

    def __post_init__(self) -> None:
        check_fields(self, "benchmarks generate")
        for name in self.shapes:
            with_vocabulary(name)


def bench_generate(config: GenerateBenchConfig) -> list[Row]:
    """Return a row for each model, dtype, batch and variant."""
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    rows = [row for name in config.shapes for row in _shape_rows(config, name)]
    versions = {}
    if "transformers" in config.variants:
        versions["transformers"] = metadata.version("transformers")
    return finish(rows, config.json, **versions)


def _shape_rows(config: GenerateBenchConfig, name: str) -> list[Row]:
    network = with_vocabulary(name)
    if "transformers" in config.variants:
        if not captured_runs(network):
            raise ValueError(
                f"benchmarks generate expects --variants without transformers for a shape that is "
                f"no Llama, got {name}."
            )
        # Without norms of queries and keys it is a Llama, which transformers has too.
        network = replace(network, qk_norm=False)
    words = f"{name}, prompts of {config.prompt_tokens} tokens, {config.max_tokens} new each"
    rows: list[Row] = []
    for dtype in config.dtypes:
        params = init_params(
            Transformer(network), 0, dtype=getattr(torch, dtype), device=config.device
        )
        peer = _peer(network, params) if "transformers" in config.variants else None
        rates = _rates(getattr(torch, dtype), config.device)
        for batch in config.batches:
            floor = _floor(num_bytes(params), num_params(network), batch, rates)
            variants = _variants(config, network, params, peer, batch)
            for row in measure(
                f"{dtype}, batch {batch}", words, variants, config.repeats, config.device
            ):
                speed = batch * config.max_tokens / row.median_s
                numbers = {"tokens_per_s": speed, "floor_tokens_per_s": floor}
                rows.append(row._replace(numbers=numbers))
    return rows


def _variants(
    config: GenerateBenchConfig,
    shape: TransformerConfig,
    params: Params,
    peer: Any,
    batch: int,
) -> Variants:
    """Return the ways to draw exactly `max_tokens` tokens of each sample from the plain policy."""
    size = (batch, config.prompt_tokens)
    prompts = torch.randint(1, shape.vocab_size, size, generator=rng.generator(0), device="cpu")
    given = prompts.to(config.device)
    tokens = config.max_tokens

    def theirs() -> Any:
        with torch.no_grad():
            return peer.generate(
                given, attention_mask=torch.ones_like(given), do_sample=True, top_k=0, top_p=1.0,
                max_new_tokens=tokens, min_new_tokens=tokens, pad_token_id=0,
            )  # fmt: skip

    def ours(model: Transformer, group: int) -> Callable[[], Any]:
        sampler = Sampler(model)
        sampler.push(params)
        sampling = Sampling(num_samples=group, max_tokens=tokens)
        return lambda: sampler.generate(prompts[: batch // group].tolist(), sampling, seed=0)

    found: Variants = {}
    if "transformers" in config.variants:
        found["transformers generate()"] = theirs
    if "sampler" in config.variants:
        found["Sampler"] = ours(Transformer(shape), 1)
    if "groups" in config.variants and batch % _GROUP == 0:
        found[f"Sampler, groups of {_GROUP}"] = ours(Transformer(shape), _GROUP)
    if "call-by-call" in config.variants:
        # A network with operations of its own is called as it is.
        found["Sampler, call by call"] = ours(Transformer(shape, NATIVE._replace()), 1)
    return found


def _peer(shape: TransformerConfig, params: Params) -> Any:
    """Return transformers' Llama with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab_size, hidden_size=shape.width, head_dim=shape.head_width,
        intermediate_size=shape.mlp_width, num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads, num_key_value_heads=shape.num_kv_heads,
        rms_norm_eps=shape.norm_eps, tie_word_embeddings=shape.tied, eos_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
    )  # fmt: skip
    leaf = params["norm.weight"]
    peer: Any = LlamaForCausalLM(config)
    peer = peer.to(device=leaf.device, dtype=leaf.dtype).eval()
    peer.load_state_dict(
        {translate(name).hugging_face: value for name, value in params.items()}, strict=False
    )
    return peer


def _rates(dtype: torch.dtype, device: str) -> tuple[float, float]:
    """Return the bytes read and the operations done a second, measured: a sum and a product."""
    large = torch.ones(64_000_000, dtype=torch.float32, device=device)
    square = torch.ones(2048, 2048, device=device, dtype=dtype)
    read = min(seconds_of(large.sum, device) for _ in range(5))
    multiply = min(seconds_of(lambda: square @ square, device) for _ in range(5))
    return num_bytes(large) / read, 2 * 2048**3 / multiply


def _floor(size: int, count: int, batch: int, rates: tuple[float, float]) -> float:
    """Return the tokens a second at which all weights are read once a step, and multiplied."""
    bandwidth, operations = rates
    return batch / max(size / bandwidth, 2 * count * batch / operations)
