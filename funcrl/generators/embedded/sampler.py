"""The embedded sampler: `Transformer` on a cache, in this process, on any device."""

import torch
from torch import nn

from funcrl.config import Sampling
from funcrl.core import checks, numerics, tree
from funcrl.core.arguments import checked
from funcrl.core.types import Params, Sample, Samples
from funcrl.generators.contracts import Lifecycle, Pushed, State, pushed
from funcrl.generators.embedded.slots import Batch
from funcrl.generators.packed import pack_weights
from funcrl.generators.prompts import Prompts, check_prompts
from funcrl.generators.stops import DecodeFn
from funcrl.models import Transformer
from funcrl.models.functional import check_params
from funcrl.models.logprobs import logprob_fn, score
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
        self._lifecycle = Lifecycle()
        self.pushed: Pushed | None = None
        self._network: Transformer | None = None  # laid out for decoding, when it is needed

    @property
    def state(self) -> State:
        """What the sampler can do now."""
        return self._lifecycle.state

    def push(self, params: Params, version: int | None = None) -> None:
        """Sample from these parameters from now on: they are referred to, not copied.

        A push that names a version does nothing if these very tensors are here as that version
        and torch has counted no write to them since. Torch does not count the writes of its fused
        optimizers and collectives, through `.data`, or by others' kernels: after these, name
        another version or none.
        """
        if self.pushed is not None and self.pushed.holds(params, version):
            return
        check_params(self._model, params)
        self.pushed, self._network = pushed(params, version), None
        self._lifecycle.state = State.READY

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, as `sample` does."""
        held = self._held("generate")
        check_prompts(prompts, sampling, self._model, self._decode, self.context_length)
        with torch.inference_mode():
            if self._network is None or held.is_written():
                params = held.params if self._dtype is None else tree.cast(held.params, self._dtype)
                self._network = pack_weights(self._model, params)
                self.pushed = pushed(held.params, held.version)
                self._lifecycle.state = State.READY
            batch = Batch(self._network, prompts, sampling, seed, self._decode, self._slots)
            batch.run()
        return _collect(batch, held.version)

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens, from the second on."""
        held = self._held("score")
        check_prompts(prompts, Sampling(), self._model, self._decode, self.context_length)
        model_fn = logprob_fn(self._model, dtype=self._dtype)
        device = next(iter(held.params.values())).device
        scores = []
        for prompt in prompts:
            tokens = torch.tensor([list(prompt)], device=device)
            positions = torch.arange(len(prompt), device=device)[None]
            found = score(model_fn, held.params, Sample(tokens, positions))
            scores.append(found.logprobs[0, 1:].tolist())
        return scores

    def sleep(self) -> None:
        """Give up the copies of the weights that are laid out for decoding."""
        self._held("sleep")
        self._network = None
        self._lifecycle.state = State.ASLEEP

    def close(self) -> None:
        """Let go of the parameters."""
        self.pushed = self._network = None
        self._lifecycle.state = State.CLOSED

    def _held(self, method: str) -> Pushed:
        self._lifecycle.check_pushed(f"Sampler.{method}")
        assert self.pushed is not None
        return self.pushed


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
