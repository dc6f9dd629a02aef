"""What the generators in this process have in common: parameters are pushed, samples are drawn."""

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from funcrl.config import Sampling
from funcrl.core import checks, numerics, tree
from funcrl.core.types import ModelFn, Params, Sample, Samples
from funcrl.generators.contracts import Lifecycle, Pushed, State, pushed
from funcrl.generators.embedded.drawn import Drawn, Request
from funcrl.generators.prompts import Prompts, check_prompts
from funcrl.generators.stops import DecodeFn
from funcrl.models.logprobs import score
from funcrl.rl.batching import pad_rows

DrawFn: TypeAlias = Callable[[Request], list[Drawn]]

UNLIMITED = 1 << 31
"""The context length of a network that does not name one."""


class Network(NamedTuple):
    """A network as a generator needs it: functions of its parameters."""

    vocab_size: int | None  # None where it is not known
    context_length: int
    model_fn: ModelFn  # for `score`
    check_params: Callable[[Params], None]  # raises unless they are the network's
    lay_out: Callable[[Params], DrawFn]  # makes what draws with these parameters


class EmbeddedGenerator:
    """A generator in this process; a subclass is a constructor that makes its `Network`.

    A push is a reference: parameters that are written into afterwards are read again.
    """

    def __init__(
        self,
        network: Network,
        *,
        decode: DecodeFn | None = None,
        slots: int = 256,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.check_count(type(self).__name__, "slots", slots)
        self._network, self._decode, self._slots, self._dtype = network, decode, slots, dtype
        self.context_length = network.context_length
        self._lifecycle = Lifecycle()
        self.pushed: Pushed | None = None
        self._draw: DrawFn | None = None  # made of the pushed parameters when it is needed

    @property
    def state(self) -> State:
        """What the generator can do now."""
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
        self._network.check_params(params)
        self.pushed, self._draw = pushed(params, version), None
        self._lifecycle.state = State.READY

    def generate(self, prompts: Prompts, sampling: Sampling, seed: int) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, as `sample` does."""
        held = self._held("generate")
        vocab_size, context_length = self._network.vocab_size, self.context_length
        check_prompts(prompts, sampling, vocab_size, self._decode, context_length)
        request = Request(prompts, sampling, seed, self._decode, self._slots, context_length)
        with torch.inference_mode():
            if self._draw is None or held.is_written():
                params = held.params if self._dtype is None else tree.cast(held.params, self._dtype)
                self._draw = self._network.lay_out(params)
                self.pushed = pushed(held.params, held.version)
                self._lifecycle.state = State.READY
            drawn = self._draw(request)
        return _collect(drawn, held, self._dtype)

    def score(self, prompts: Prompts) -> list[list[float]]:
        """Return the log-probability of each prompt's tokens, from the second on."""
        held = self._held("score")
        limits = self._network.vocab_size, self._decode, self.context_length
        check_prompts(prompts, Sampling(), *limits)
        device = _leaf(held.params).device
        scores = []
        for prompt in prompts:
            tokens = torch.tensor([list(prompt)], device=device)
            positions = torch.arange(len(prompt), device=device)[None]
            found = score(self._network.model_fn, held.params, Sample(tokens, positions))
            scores.append(found.logprobs[0, 1:].tolist())
        return scores

    def sleep(self) -> None:
        """Give up the copies of the weights that are laid out for decoding."""
        self._held("sleep")
        self._draw = None
        self._lifecycle.state = State.ASLEEP

    def close(self) -> None:
        """Let go of the parameters."""
        self.pushed = self._draw = None
        self._lifecycle.state = State.CLOSED

    def _held(self, method: str) -> Pushed:
        self._lifecycle.check_pushed(f"{type(self).__name__}.{method}")
        assert self.pushed is not None
        return self.pushed


def _leaf(params: Params) -> torch.Tensor:
    return next(iter(params.values()))


def _collect(drawn: list[Drawn], held: Pushed, dtype: torch.dtype | None) -> Samples:
    """Return finished samples, as tensors that a loss may use: not of inference mode."""
    leaf = _leaf(held.params)
    wide = numerics.at_least_float32(dtype or leaf.dtype)

    def padded(rows: list[list[int]] | list[list[float]], kind: torch.dtype) -> torch.Tensor:
        return pad_rows(rows, kind, leaf.device)

    return Samples(
        tokens=padded([each.tokens for each in drawn], torch.int64),
        mask=padded([[1] * len(each.tokens) for each in drawn], torch.bool),
        logprobs=padded([each.logprobs for each in drawn], wide),
        policy_logprobs=padded([each.policy_logprobs for each in drawn], wide),
        finish_reasons=tuple(each.reason for each in drawn),
        policy_version=held.version,
    )
