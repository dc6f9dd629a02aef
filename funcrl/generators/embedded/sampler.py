"""The embedded sampler: `Transformer` on a cache, in this process, on any device."""

import torch
from torch import nn

from funcrl.config import Sampling
from funcrl.core import checks, numerics, tree
from funcrl.core.arguments import checked
from funcrl.core.types import Params, Samples
from funcrl.generators.embedded.packed import pack_weights
from funcrl.generators.embedded.slots import Batch, Prompts
from funcrl.generators.stops import DecodeFn
from funcrl.models import Transformer
from funcrl.models.functional import check_params
from funcrl.rl.batching import pad_rows


@checked
def sample(
    model: nn.Module,
    params: Params,
    prompts: Prompts,
    sampling: Sampling,
    seed: int,
    *,
    decode: DecodeFn | None = None,
    slots: int = 256,
) -> Samples:
    """Return `sampling.num_samples` completions of each prompt.

    A sample is a function of the parameters, its prompt, the seed and its number among the samples
    of that prompt: what else is in the batch, and in which order, does not matter, up to the
    rounding of products of other shapes.

    Args:
        model: a `funcrl.models.Transformer`.
        params: its parameters; their dtype is the one computed in.
        prompts: N lists of tokens.
        sampling: how to draw.
        seed: of all the draws.
        decode: from tokens to text, for `sampling.stop`.
        slots: samples drawn at a time, which bounds the memory of the cache; at least
            `sampling.num_samples`.

    Example:
        >>> import funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> params = funcrl.init_params(model, seed=0)
        >>> sampling = funcrl.generators.Sampling(num_samples=2, max_tokens=5)
        >>> samples = funcrl.generators.sample(model, params, [[1, 2], [3]], sampling, seed=0)
        >>> samples.tokens.shape, samples.finish_reasons
        (torch.Size([4, 5]), ('length', 'length', 'length', 'length'))
    """
    generator = Sampler(model, decode=decode, slots=slots)
    generator.push(params)
    return generator.generate(prompts, sampling, seed)


class Sampler:
    """The generator that needs nothing but torch: `push` parameters, then `generate`.

    Args:
        model: a `funcrl.models.Transformer`.
        decode: from tokens to text, for stop strings.
        slots: samples drawn at a time; finished ones leave at once and waiting prompts enter.
        dtype: to compute in; that of the parameters when left out.

    A push is a reference: parameters that are written into afterwards are read again.

    Example:
        >>> import funcrl
        >>> config = funcrl.models.TransformerConfig(vocab_size=7, width=8, num_layers=1)
        >>> model = funcrl.models.Transformer(config)
        >>> sampler = funcrl.generators.Sampler(model)
        >>> sampler.push(funcrl.init_params(model, seed=0), version=3)
        >>> samples = sampler.generate([[1, 2]], funcrl.generators.Sampling(max_tokens=4), seed=0)
        >>> samples.tokens.shape, samples.policy_version
        (torch.Size([1, 4]), 3)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        decode: DecodeFn | None = None,
        slots: int = 256,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not isinstance(model, Transformer):
            raise TypeError(
                f"Sampler expects a funcrl.models.Transformer, got {type(model).__name__}."
            )
        checks.check_count("Sampler", "slots", slots)
        self._model = model
        self.context_length = model.config.context_length
        self._decode = decode
        self._slots = slots
        self._dtype = dtype
        self._params: Params | None = None
        self._network: Transformer | None = None
        self._written: list[int] = []  # how often each parameter in `_network` had been written to
        self._version = 0

    def push(self, params: Params, version: int = 0) -> None:
        """Sample from these parameters from now on: they are referred to, not copied."""
        check_params(self._model, params)
        self._params = params
        self._network = None  # made when it is needed
        self._version = version

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, as `sample` does."""
        params = self._params
        if params is None:
            raise RuntimeError("Sampler.generate expects parameters, got none; call push first.")
        check_prompts(prompts, sampling, self._model, self._decode, self.context_length)
        with torch.inference_mode():
            written = num_writes(params)
            if self._network is None or written != self._written:
                self._network = pack_weights(self._model, self._cast(params))
                self._written = written
            batch = Batch(self._network, prompts, sampling, seed, self._decode, self._slots)
            batch.run()
        return _collect(batch, self._version)

    def _cast(self, params: Params) -> Params:
        return params if self._dtype is None else tree.cast(params, self._dtype)

    def close(self) -> None:
        """Let go of the parameters."""
        self._params = self._network = None


def _collect(batch: Batch, version: int) -> Samples:
    """Return the finished batch, as tensors that a loss may use: not of inference mode."""
    weight = batch.network.norm.weight
    wide = numerics.at_least_float32(weight.dtype)

    def padded(rows: list[list[int]] | list[list[float]], dtype: torch.dtype) -> torch.Tensor:
        return pad_rows(rows, dtype, weight.device)

    return Samples(
        tokens=padded([drawn.tokens for drawn in batch.drawn], torch.int64),
        mask=padded([[1] * len(drawn.tokens) for drawn in batch.drawn], torch.bool),
        logprobs=padded([drawn.logprobs for drawn in batch.drawn], wide),
        policy_logprobs=padded([drawn.policy_logprobs for drawn in batch.drawn], wide),
        finish_reasons=tuple(batch.reasons),
        policy_version=version,
    )


def num_writes(params: Params) -> list[int]:
    """Return how often each parameter has been written to, as far as torch counts.

    Example:
        >>> import torch
        >>> from funcrl.generators.embedded.sampler import num_writes
        >>> num_writes({"weight": torch.zeros(2).add_(1.0)})
        [1]
    """
    return [0 if leaf.is_inference() else leaf._version for leaf in params.values()]


def check_prompts(
    prompts: Prompts,
    sampling: Sampling,
    model: Transformer,
    decode: DecodeFn | None,
    context_length: int,
) -> None:
    """Raise if a generator cannot complete these prompts.

    Args:
        prompts: N lists of tokens.
        sampling: how to draw.
        model: whose vocabulary it is.
        decode: from tokens to text.
        context_length: tokens of a prompt and its completion, at most.

    Example:
        >>> import funcrl
        >>> from funcrl.generators.embedded.sampler import check_prompts
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> check_prompts([[1, 2]], funcrl.config.Sampling(), model, None, context_length=64)
    """
    config = model.config
    if len(prompts) == 0:
        raise ValueError("generate expects at least one prompt, got none.")
    if sampling.stop and decode is None:
        raise ValueError(
            f"generate expects a decode function for stop strings, got stop={sampling.stop} and no "
            f"decode; make the generator with decode=tokenizer.decode."
        )
    if len(set(sampling.stop_tokens)) >= config.vocab_size:
        raise ValueError("generate expects a token that is not a stop token, got none.")
    for token in sampling.stop_tokens:
        checks.check_range("generate", "stop_tokens", token, 0, config.vocab_size - 1)
    for index, prompt in enumerate(prompts):
        if not 0 < len(prompt) < context_length:
            raise ValueError(
                f"generate expects prompts of 1 to {context_length - 1} tokens, fewer than "
                f"the generator's context_length, got {len(prompt)} in prompt {index}."
            )
        wrong = [token for token in prompt if not 0 <= token < config.vocab_size]
        if wrong:
            raise ValueError(
                f"generate expects tokens below vocab_size={config.vocab_size}, got {wrong[0]} in "
                f"prompt {index}."
            )
