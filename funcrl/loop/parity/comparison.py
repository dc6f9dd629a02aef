"""Whether a generator and the trainer compute the same log-probabilities, token by token."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import rng
from funcrl.core.arguments import checked
from funcrl.core.types import Params, Sample, Samples
from funcrl.generators import VLLM, Sampler
from funcrl.loop.parity.generators import sampler_ways, vllm_rows
from funcrl.loop.parity.results import Parity, ParityConfig, ParityRow
from funcrl.loop.parity.sides import (
    Side,
    Way,
    difference,
    first_difference,
    tokens_fn,
)
from funcrl.loop.parity.trainer import one_by_one, trainer_ways
from funcrl.loop.sources import find_weights
from funcrl.models import SHAPES, Transformer, init_params, shape
from funcrl.models.initial import is_shape
from funcrl.models.logprobs import logprob_fn, score
from funcrl.weights import load_params

_VOCABULARY = 512  # of a shape, which has none of its own


@checked
def parity(config: ParityConfig) -> Parity:
    """Return how far a generator's log-probabilities are from the trainer's.

    The trainer's are those of `logprob_fn`, all tokens of a sample at once: teacher forcing. The
    rows of the result are other ways to compute them, of trainer and generators.

    Args:
        config: what to compare.

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
    model, params = _model(config, dtype)
    prompts = _prompts(config, model.config.vocab_size)
    generator: Sampler | VLLM = Sampler(model)
    if config.generator == "vllm":
        generator = VLLM(model, config=config.vllm, dtype=dtype)
    try:
        generator.push(params)
        sampling = Sampling(config.num_samples, max_tokens=config.max_tokens)
        samples = generator.generate(prompts, sampling, rng.fold_in(config.seed, 2))
        result = compare(model, params, prompts, samples)
        rows = _rows(config, model, params, _whole(prompts, samples), generator)
        drawn = ParityRow(
            f"{'vLLM' if config.generator == 'vllm' else 'sampler'}, as drawn", *result[:3]
        )
        return result._replace(rows=(drawn, *rows))
    finally:
        generator.close()


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


def compare_ways(
    ways: Iterator[Way],
    model: Transformer,
    params: Params,
    tokens: Tensor,
    bisect: bool = False,
) -> Iterator[ParityRow]:
    """Yield a row for each way against the trainer's forward pass of one sample at a time.

    Args:
        ways: to compute log-probabilities of the samples.
        model: the reference's network.
        params: its parameters.
        tokens: [B, T], the samples.
        bisect: whether to look for the first operation that differs.
    """
    reference = one_by_one(tokens_fn(model, False), params, tokens)
    recorded: Side = {}
    for way in ways:
        row = difference(way.name, reference, way.run(False))
        if bisect and way.records and row.different:
            recorded = recorded or one_by_one(tokens_fn(model, True), params, tokens)
            row = row._replace(first_difference=first_difference(recorded, way.run(True)))
        yield row


def _rows(
    config: ParityConfig,
    model: Transformer,
    params: Params,
    tokens: Tensor,
    generator: Sampler | VLLM,
) -> Iterator[ParityRow]:
    prompt, ways = config.prompt_tokens, list[Iterator[Way]]()
    if config.rows == "all":
        ways.append(trainer_ways(model, params, tokens, prompt, config.compiled))
    if config.rows == "all" or config.generator == "sampler":
        ways.append(sampler_ways(model, params, tokens, prompt))
    yield from compare_ways(chain(*ways), model, params, tokens, config.bisect)
    if isinstance(generator, VLLM):

        def reference(tokens: Tensor) -> Side:
            return one_by_one(tokens_fn(model, False), params, tokens)

        seed = rng.fold_in(config.seed, 3)
        yield from vllm_rows(generator, config.vllm, tokens, reference, seed)


def _whole(prompts: list[list[int]], samples: Samples) -> Tensor:
    """Return prompts and completions [B, T], which all have one length: nothing ends one early."""
    group = len(samples.tokens) // len(prompts)
    before = torch.tensor(prompts, device=samples.tokens.device)
    return torch.cat([before.repeat_interleave(group, dim=0), samples.tokens], dim=1)


def _model(config: ParityConfig, dtype: torch.dtype) -> tuple[Transformer, Params]:
    if config.model in SHAPES:
        chosen = replace(shape(config.model, _VOCABULARY), numerics=config.numerics)
        model = Transformer(chosen)
        return model, init_params(model, config.seed, dtype, config.device)
    if is_shape(config.model):
        raise ValueError(f"parity expects --model to be a Transformer, got {config.model}.")
    loaded, params = load_params(find_weights("parity", config.model), dtype, config.device)
    return Transformer(replace(loaded.config, numerics=config.numerics)), params


def _prompts(config: ParityConfig, vocab_size: int) -> list[list[int]]:
    """Return prompts of random tokens, which exercise more of a vocabulary than text."""
    return [
        [rng.fold_in(config.seed, 1, n, t) % vocab_size for t in range(config.prompt_tokens)]
        for n in range(config.num_prompts)
    ]
