"""What the generators in this process have in common: parameters are pushed, samples are drawn."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import torch

from funcrl.config import Sampling
from funcrl.core import checks, tree
from funcrl.core.types import ModelFn, Params, Sample, Samples
from funcrl.generators.contract import Lifecycle, Prompts, Pushed, State, check_prompts, pushed
from funcrl.generators.embedded.schedule import Completions, ListenFn, Request
from funcrl.generators.stops import DecodeFn
from funcrl.models.logprobs import score

DrawFn: TypeAlias = Callable[[Request], Completions]
# (parameters, the dtype to compute in or None for theirs) -> what draws with them
LayOutFn: TypeAlias = Callable[[Params, torch.dtype | None], DrawFn]

UNLIMITED = 1 << 31
"""The context length of a network that does not name one."""
PASS_TOKENS = 16384
"""The tokens of one forward pass, so that its logits and activations stay bounded."""


class Network(NamedTuple):
    """A network as a generator needs it: functions of its parameters."""

    vocab_size: int | None  # None where it is not known
    context_length: int
    model_fn: ModelFn  # for `score`
    check_params: Callable[[Params], None]  # raises unless they are the network's
    lay_out: LayOutFn
    free: Callable[[], None] = lambda: None  # lets go of what is kept from one push to the next
    # Lets what draws go of what it keeps of the samples of its last call, to go on from them.
    forget: Callable[[Any], None] = lambda _: None


class EmbeddedGenerator:
    """A generator in this process; a subclass is a constructor that makes its `Network`.

    A push copies nothing: if the pushed tensors are changed in place, the new values are used.
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

    def generate(
        self, prompts: Prompts, sampling: Sampling, seed: int, listen: ListenFn | None = None
    ) -> Samples:
        """Return `sampling.num_samples` completions of each prompt, as `sample` does.

        `listen` is called with the number of a sample and its next token, one by one while they
        are drawn; an error that it raises ends the call.
        """
        held = self._held("generate")
        vocab_size, context_length = self._network.vocab_size, self.context_length
        check_prompts(prompts, sampling, vocab_size, self._decode, context_length)
        request = Request(
            prompts, sampling, seed, self._decode, self._slots, context_length, listen
        )
        with torch.inference_mode():
            if self._draw is None or held.is_written():
                self._draw = self._network.lay_out(held.params, self._dtype)
                self.pushed = pushed(held.params, held.version)
                self._lifecycle.state = State.READY
            drawn = self._draw(request)
        return _owned(drawn, held.version)

    def forget(self) -> None:
        """Go on from no sample of earlier calls: the next one depends on its arguments alone.

        Only the sampler of a recurrent network keeps its last samples' states for their next turns.
        """
        if self._draw is not None:
            self._network.forget(self._draw)

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
        """Give up the copies of the weights that are laid out for decoding, and all memory."""
        self._held("sleep")
        self._draw = None
        self._network.free()
        self._lifecycle.state = State.ASLEEP

    def close(self) -> None:
        """Let go of the parameters."""
        self.pushed = self._draw = None
        self._network.free()
        self._lifecycle.state = State.CLOSED

    def _held(self, method: str) -> Pushed:
        self._lifecycle.check_pushed(f"{type(self).__name__}.{method}")
        assert self.pushed is not None
        return self.pushed


def cast(params: Params, dtype: torch.dtype | None) -> Params:
    """Return parameters in the dtype to compute in, or as they are where there is none."""
    return params if dtype is None else tree.cast(params, dtype)


def _leaf(params: Params) -> torch.Tensor:
    return next(iter(params.values()))


def _owned(found: Completions, version: int) -> Samples:
    """Return samples of one's own, as tensors that a loss may use: not of inference mode."""
    tokens, mask, logprobs, policy_logprobs = (each.clone() for each in found[:4])
    return Samples(tokens, mask, logprobs, policy_logprobs, found.finish_reasons, version)
