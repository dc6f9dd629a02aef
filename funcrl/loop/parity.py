"""Whether a generator and the trainer compute the same log-probabilities, token by token."""

from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch

from funcrl.config import Sampling, VLLMConfig
from funcrl.core import rng
from funcrl.core.arguments import Count, Natural, NotNegative, check_fields, checked
from funcrl.core.types import Params, Sample, Samples
from funcrl.generators import VLLM, Generator, Sampler
from funcrl.loop.parts.sources import find_weights
from funcrl.models import SHAPES, Transformer, init_params, shape
from funcrl.models.logprobs import logprob_fn, score
from funcrl.weights import load_params

_VOCABULARY = 512  # of a shape, which has none of its own
# Far above rounding, far below what any mistake does to a model with structure.
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.5}


@dataclass(frozen=True)
class ParityConfig:
    """Compare a generator's log-probabilities with the trainer's, on tokens that it draws."""

    model: str = "micro"
    """A shape, with random weights, or pretrained ones, as for `funcrl train`."""
    generator: Literal["sampler", "vllm"] = "sampler"
    """The generator whose log-probabilities are checked."""
    vllm: VLLMConfig = field(default_factory=VLLMConfig)
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
    """The largest difference that passes; 1e-3 in float32 and 0.5 in bfloat16 when left out."""
    json: bool = False
    """Print the result as one JSON object."""

    def __post_init__(self) -> None:
        check_fields(self, "parity")

    @property
    def limit(self) -> float:
        """The largest difference that passes."""
        return _TOLERANCE[self.dtype] if self.tolerance is None else self.tolerance


class Parity(NamedTuple):
    """The result of a comparison, over all sampled tokens."""

    tokens: int
    different: int  # of them, with another log-probability, by however little
    max_abs_diff: float
    mean_abs_diff: float
    bitwise: bool


@checked
def parity(config: ParityConfig) -> Parity:
    """Return how far a generator's log-probabilities are from the trainer's.

    The trainer's are those of `logprob_fn`, all tokens of a completion at once: teacher forcing.

    Args:
        config: what to compare.

    Example:
        >>> import funcrl
        >>> from funcrl.loop.parity import ParityConfig
        >>> result = funcrl.parity(ParityConfig(num_prompts=2, max_tokens=4))
        >>> result.tokens, result.max_abs_diff < 1e-5
        (32, True)
    """
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("parity expects --device cpu where torch sees no GPU, got cuda.")
    dtype = getattr(torch, config.dtype)
    model, params = _model(config, dtype)
    prompts = _prompts(config, model.config.vocab_size)
    generator: Generator = Sampler(model)
    if config.generator == "vllm":
        generator = VLLM(model, config=config.vllm, dtype=dtype)
    try:
        generator.push(params)
        sampling = Sampling(config.num_samples, max_tokens=config.max_tokens)
        samples = generator.generate(prompts, sampling, rng.fold_in(config.seed, 2))
    finally:
        generator.close()
    return compare(model, params, prompts, samples)


def compare(
    model: Transformer, params: Params, prompts: list[list[int]], samples: Samples
) -> Parity:
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


def format_parity(config: ParityConfig, result: Parity) -> str:
    """Return a comparison as three lines of text."""
    return (
        f"{config.model}, {config.generator}, {config.dtype}: {result.tokens} tokens, "
        f"{result.different} of them differ\n"
        f"largest difference {result.max_abs_diff:.2e}, mean {result.mean_abs_diff:.2e} "
        f"(tolerance {config.limit:.2e})\n"
        f"bitwise identical: {'yes' if result.bitwise else 'no'}"
    )


def _model(config: ParityConfig, dtype: torch.dtype) -> tuple[Transformer, Params]:
    if config.model in SHAPES:
        model = Transformer(shape(config.model, _VOCABULARY))
        return model, init_params(model, config.seed, dtype, config.device)
    return load_params(find_weights("parity", config.model), dtype, config.device)


def _prompts(config: ParityConfig, vocab_size: int) -> list[list[int]]:
    """Return prompts of random tokens, which exercise more of a vocabulary than text."""
    return [
        [rng.fold_in(config.seed, 1, n, t) % vocab_size for t in range(config.prompt_tokens)]
        for n in range(config.num_prompts)
    ]
