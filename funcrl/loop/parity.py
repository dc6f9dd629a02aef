"""`funcrl parity`: whether a generator and the trainer compute the same log-probabilities."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from funcrl.config import Sampling, TrainConfig, VLLMConfig
from funcrl.core import rng, tree
from funcrl.core.arguments import Count, Natural, NotNegative, check_fields, checked
from funcrl.core.types import Params, Sample, Samples
from funcrl.generators import VLLM, Generator
from funcrl.loop.from_config import embedded
from funcrl.loop.parity_ways import (
    ParityRow,
    Side,
    Way,
    difference,
    first_difference,
    sampler_ways,
    trainer_side,
    vllm_rows,
)
from funcrl.loop.sources import base_params, find_source, network_of
from funcrl.models import Transformer
from funcrl.models.logprobs import logprob_fn, score
from funcrl.models.networks import logits_fn, vocab_size_of
from funcrl.weights import load_params

# Far above rounding, far below what any mistake does to a model with structure.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}
_VOCABULARY = 512  # of a network that starts from nothing, which has none of its own


@dataclass(frozen=True)
class ParityConfig:
    """Compare log-probabilities of a generator and of a trainer, on tokens that are drawn."""

    model: str = "micro"
    """The network: a shape, with random weights, pretrained weights, the folder of a run, or one's
    own network, as for `funcrl train`."""
    numerics: Literal["native", "exact"] = "native"
    """The operations of the model: torch's fastest, or those whose result for a token depends on
    that token's sample alone, so that all ways to compute it agree to the last bit."""
    generator: Literal["sampler", "vllm"] = "sampler"
    """The generator that draws the tokens, and whose log-probabilities are checked."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
    bisect: bool = False
    """Print the first layer and operation whose result differs, in a network of funcrl's own
    layers. Every result of a batch is in memory at a time, so a large model needs few prompts."""
    num_prompts: Count = 8
    """The number of prompts, of random tokens."""
    num_samples: Count = 4
    """The number of completions of each prompt."""
    prompt_tokens: Count = 16
    """The number of tokens of each prompt."""
    max_tokens: Count = 32
    """The number of tokens of each completion."""
    seed: Natural = 0
    """The seed of the weights, the prompts and the draws."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to run on."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype to compute in."""
    tolerance: NotNegative | None = None
    """The largest difference that passes, in any row; when left out 0 with exact numerics, else
    1e-3 in float32 and 0.5 in bfloat16."""
    json: bool = False
    """Print the result as one JSON object."""

    def __post_init__(self) -> None:
        check_fields(self, "parity")

    @property
    def limit(self) -> float:
        """The largest difference that passes."""
        if self.tolerance is not None:
            return self.tolerance
        return 0.0 if self.numerics == "exact" else _TOLERANCE[self.dtype]


class Parity(NamedTuple):
    """The result of a comparison: the generator's sampled tokens, and a row for each way."""

    tokens: int
    different: int  # of them, with another log-probability, by however little
    max_abs_diff: float
    mean_abs_diff: float
    bitwise: bool
    rows: tuple[ParityRow, ...] = ()

    @property
    def largest(self) -> float:
        """The largest difference of all rows; NaN where one is not a number."""
        found = [self.max_abs_diff, *(row.max_abs_diff for row in self.rows)]
        return math.nan if any(map(math.isnan, found)) else max(found)

    def as_json(self) -> dict[str, object]:
        """Return the fields as plain values."""
        rows = [{**row._asdict(), "equal": row.equal} for row in self.rows]
        return {**self._asdict(), "rows": rows}


@checked
def parity(config: ParityConfig, *, trust: bool = False) -> Parity:
    """Return how far a generator's log-probabilities are from the trainer's.

    The trainer's are those of `logprob_fn`, all tokens of a sample at once: teacher forcing. The
    rows of the result are the generator's ways to compute them: as they were drawn, and those of
    the sampler for a `Transformer` and of vLLM besides.

    Args:
        config: what to compare.
        trust: run a network of one's own that the folder of a run in `config.model` names.

    Example:
        >>> import funcrl
        >>> from funcrl.loop.parity import ParityConfig
        >>> config = ParityConfig(numerics="exact", num_prompts=2, max_tokens=4)
        >>> result = funcrl.parity(config)
        >>> result.tokens, result.bitwise, {row.equal for row in result.rows}
        (32, True, {True})
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("parity expects --device cpu where torch sees no GPU, got cuda.")
    dtype = getattr(torch, config.dtype)
    model, params = _network(config, dtype, trust)
    prompts = _prompts(config, _vocab_size(model, params))
    generator: Generator = embedded(model)(model)
    if config.generator == "vllm":
        generator = VLLM(model, config=config.vllm, dtype=dtype)
    try:
        generator.push(params)
        sampling = Sampling(config.num_samples, max_tokens=config.max_tokens)
        samples = generator.generate(prompts, sampling, rng.fold_in(config.seed, 2))
        result = compare(model, params, prompts, samples)
        tokens = _whole(prompts, samples)
        rows: list[ParityRow] = []
        if isinstance(model, Transformer):
            ways = sampler_ways(model, params, tokens, config.prompt_tokens)
            rows += compare_ways(ways, model, params, tokens, config.bisect)
        if isinstance(generator, VLLM):
            seed = rng.fold_in(config.seed, 3)
            rows += vllm_rows(generator, config.vllm, model, params, tokens, seed)
        drawn = ParityRow(
            f"{'vLLM' if config.generator == 'vllm' else 'sampler'}, as drawn", *result[:3]
        )
        return result._replace(rows=(drawn, *rows))
    finally:
        generator.close()


def compare(model: nn.Module, params: Params, prompts: list[list[int]], samples: Samples) -> Parity:
    """Return how far the log-probabilities of samples of prompts are from the trainer's own."""
    group = len(samples.tokens) // len(prompts)
    lengths = samples.mask.sum(dim=1).tolist()
    generated, expected = [], []
    model_fn = logprob_fn(model)
    for row, length in enumerate(lengths):
        prompt = prompts[row // group]
        drawn = samples.tokens[row, :length]
        tokens = torch.cat([torch.tensor(prompt, device=drawn.device), drawn])[None]
        positions = torch.arange(tokens.shape[1], device=drawn.device)[None]
        scored = score(model_fn, params, Sample(tokens, positions)).logprobs[0, len(prompt) :]
        generated.append(samples.policy_logprobs[row, :length].double())
        expected.append(scored.double())
    difference = (torch.cat(generated) - torch.cat(expected)).abs()
    return Parity(
        tokens=difference.numel(),
        different=int((difference != 0).sum()),
        max_abs_diff=difference.max().item(),
        mean_abs_diff=difference.mean().item(),
        bitwise=bool((difference == 0).all()),
    )


def compare_ways(
    ways: Iterable[Way],
    model: Transformer,
    params: Params,
    tokens: Tensor,
    bisect: bool = False,
) -> list[ParityRow]:
    """Return a row for each way against the trainer's forward pass of one sample at a time.

    Args:
        ways: to compute log-probabilities of the samples.
        model: the trainer's network.
        params: its parameters.
        tokens: [B, T], the samples.
        bisect: whether to look for the first operation that differs.
    """
    reference = trainer_side(model, params, tokens)
    recorded: Side = {}
    rows = []
    for way in ways:
        row = difference(way.name, reference, way.run(False))
        if bisect and row.different:
            recorded = recorded or trainer_side(model, params, tokens, recorded=True)
            row = row._replace(first_difference=first_difference(recorded, way.run(True)))
        rows.append(row)
    return rows


def _whole(prompts: list[list[int]], samples: Samples) -> Tensor:
    """Return prompts and completions [B, T], which all have one length: nothing ends one early."""
    group = len(samples.tokens) // len(prompts)
    before = torch.tensor(prompts, device=samples.tokens.device)
    return torch.cat([before.repeat_interleave(group, dim=0), samples.tokens], dim=1)


def _network(config: ParityConfig, dtype: torch.dtype, trust: bool) -> tuple[nn.Module, Params]:
    """Return the network that `funcrl train` begins with, and its parameters in a dtype."""
    options = TrainConfig(
        model=config.model, numerics=config.numerics, device=config.device, seed=config.seed
    )
    source = find_source("parity", config.model)
    model = network_of("parity", options, source, _VOCABULARY, trust=trust)
    if config.bisect and not isinstance(model, Transformer):
        raise ValueError(
            f"parity expects a funcrl.models.Transformer with --bisect, which compares its "
            f"operations, got {type(model).__name__}."
        )
    if source.weights is not None:  # cast as they are read
        return model, load_params(source.weights, dtype, config.device)[1]
    return model, tree.cast(base_params(options, source, model), dtype)


def _vocab_size(model: nn.Module, params: Params) -> int:
    """Return the size of a network's vocabulary: it says it, or its logits are as many."""
    token = torch.zeros(1, dtype=torch.int64, device=tree.leaves(params)[0].device)
    return vocab_size_of(model) or logits_fn(model)(params, Sample(token, token)).shape[-1]


def _prompts(config: ParityConfig, vocab_size: int) -> list[list[int]]:
    """Return prompts of random tokens, which exercise more of a vocabulary than text."""
    return [
        [rng.fold_in(config.seed, 1, n, t) % vocab_size for t in range(config.prompt_tokens)]
        for n in range(config.num_prompts)
    ]


def format_parity(config: ParityConfig, result: Parity) -> str:
    """Return a comparison as text: the generator in three lines, and the table."""
    lines = [
        f"{config.model}, {config.generator}, {config.numerics} numerics, {config.dtype}: "
        f"{result.tokens} tokens, {result.different} of them differ",
        f"largest difference {result.max_abs_diff:.2e}, mean {result.mean_abs_diff:.2e} "
        f"(tolerance {config.limit:.2e})",
        f"bitwise identical: {'yes' if result.bitwise else 'no'}",
        "",
        "Each way against the trainer's forward pass of one sample at a time:",
    ]
    width = max((len(row.name) for row in result.rows), default=0)
    for row in result.rows:
        tokens = "-" if row.skipped else f"{row.tokens:,}"
        lines.append(f"  {row.name:{width}}  {tokens:>7} tokens  {_verdict(row)}")
        if row.first_difference:
            lines.append(f"  {'':{width}}  first: {row.first_difference}")
    if config.bisect and all(row.equal or row.skipped for row in result.rows):
        lines += ["", "Nothing differs in any layer."]
    return "\n".join(lines)


def _verdict(row: ParityRow) -> str:
    if row.skipped:
        return f"not computed: {row.skipped}"
    if row.equal:
        return "equal"
    return f"{row.different:,} differ, by at most {row.max_abs_diff:.1e}"
