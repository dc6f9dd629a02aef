"""Continuous batching on the host: how samples are admitted to slots, grow and end."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import numerics
from funcrl.generators.contract import Prompts
from funcrl.generators.stops import DecodeFn, has_stop_string
from funcrl.rl.batching import pad_rows

ListenFn: TypeAlias = Callable[[int, int], None]  # (number of a sample, its next token)


class Request(NamedTuple):
    """What a generator in this process is to draw, after its checks."""

    prompts: Prompts
    sampling: Sampling
    seed: int
    decode: DecodeFn | None
    slots: int  # samples drawn at a time
    context_length: int
    listen: ListenFn | None = None  # is called with each token once it is known

    @property
    def max_tokens(self) -> int:
        """The largest number of tokens that a sample may get."""
        return min(self.sampling.max_tokens, self.context_length)

    @property
    def places(self) -> int:
        """The largest number of tokens that are fed to the network: not the last of a sample."""
        longest = max(map(len, self.prompts)) + self.sampling.max_tokens - 1
        return min(longest, self.context_length)


class Completions(NamedTuple):
    """Finished samples [B, S], padded with zeros on the right."""

    tokens: Tensor
    mask: Tensor
    logprobs: Tensor
    policy_logprobs: Tensor
    finish_reasons: tuple[str, ...]


class Drawn:
    """One sample, growing while it is drawn."""

    def __init__(self, prompt: int, room: int, listen: Callable[[int], None] | None) -> None:
        self.prompt, self._room = prompt, room  # the prompt's index, the most tokens that fit
        self._listen = listen  # hears of each token
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.policy_logprobs: list[float] = []
        self.reason = ""  # why it ended, "" while it goes on

    def append(self, token: int, logprob: float, policy_logprob: float) -> None:
        """Add a token; raise if the network left no distribution to draw it from."""
        if not (math.isfinite(logprob) and math.isfinite(policy_logprob)):
            raise diverged(policy_logprob, len(self.tokens), self.prompt)
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.policy_logprobs.append(policy_logprob)
        if self._listen is not None:
            self._listen(token)

    def end(self, request: Request) -> bool:
        """Set the reason if the sample ends here, and return whether it does."""
        sampling = request.sampling
        stopped = self.tokens[-1] in sampling.stop_tokens
        if sampling.stop and not stopped:  # its checks are a fifth of a small model's step
            stopped = has_stop_string(self.tokens, sampling, request.decode)
        if stopped:
            self.reason = "stop"
        elif len(self.tokens) == self._room:
            self.reason = "length"
        return bool(self.reason)


def new_samples(request: Request) -> list[Drawn]:
    """Return the samples of a request, group-major, with no tokens yet."""
    group, listen, most = request.sampling.num_samples, request.listen, request.sampling.max_tokens
    rooms = [min(most, request.context_length - len(prompt)) for prompt in request.prompts]
    return [
        Drawn(row // group, rooms[row // group], None if listen is None else partial(listen, row))
        for row in range(group * len(request.prompts))
    ]


def append_tokens(samples: list[Drawn], drawn: tuple[Tensor, Tensor, Tensor]) -> None:
    """Add to each sample what `draw_tokens` drew for it."""
    columns = zip(*(values.tolist() for values in drawn), strict=True)
    for sample, column in zip(samples, columns, strict=True):
        sample.append(*column)


def completions(drawn: list[Drawn], like: Tensor) -> Completions:
    """Return finished samples on the device of a weight, in its dtype, or a wider one."""
    wide = numerics.at_least_float32(like.dtype)

    def padded(rows: list[list[int]] | list[list[float]], kind: torch.dtype) -> Tensor:
        return pad_rows(rows, kind, like.device)

    return Completions(
        tokens=padded([each.tokens for each in drawn], torch.int64),
        mask=padded([[1] * len(each.tokens) for each in drawn], torch.bool),
        logprobs=padded([each.logprobs for each in drawn], wide),
        policy_logprobs=padded([each.policy_logprobs for each in drawn], wide),
        finish_reasons=tuple(each.reason for each in drawn),
    )


def diverged(policy_logprob: float, count: int, prompt: int) -> FloatingPointError:
    """Return the error of a network that left no distribution to draw from."""
    return FloatingPointError(
        f"generate expects logits that leave a distribution to draw from, got a "
        f"log-probability of {policy_logprob} after {count} tokens of prompt {prompt}; have the "
        f"parameters diverged?"
    )


# Padded prompt tokens in one prefill, so that its activations stay bounded.
_PREFILL_TOKENS = 16384

Running = TypeVar("Running")  # what the caller keeps of a sample in a slot


class Moves(NamedTuple):
    """How the samples left close the gaps: the slots from `left` on are free afterwards."""

    to: list[int]
    origin: list[int]
    left: int


class Schedule(Generic[Running]):
    """The samples of a request: those that are drawn fill the first slots, without gaps.

    Prompts are admitted in their order, all samples of one together. A sample that is evicted gives
    its slot to the last one, so that a finished sample costs nothing.

    Args:
        request: what is drawn.
        start: of the number of a prompt, what to keep of each of its samples; None if there is no
            memory for them now.
        unread: the tokens of each prompt that a prefill reads; all of them when left out.
    """

    def __init__(
        self,
        request: Request,
        start: Callable[[int], Iterable[Running] | None],
        unread: Sequence[int] | None = None,
    ) -> None:
        self.group = request.sampling.num_samples
        self.num_slots = min(max(request.slots, self.group), self.group * len(request.prompts))
        self.running: list[Running] = []
        self._waiting = deque(range(len(request.prompts)))
        self._unread = [len(each) for each in request.prompts] if unread is None else unread
        self._start = start

    @property
    def is_done(self) -> bool:
        """Whether no sample is drawn and no prompt waits."""
        return not self._waiting and not self.running

    def admit(self) -> tuple[list[int], slice]:
        """Give slots to the samples of waiting prompts, as many as fit and one prefill can read.

        Returns the prompts, and the slots of their samples.
        """
        before, longest = len(self.running), 0
        admitted: list[int] = []
        while self._waiting and len(self.running) + self.group <= self.num_slots:
            longest = max(longest, self._unread[self._waiting[0]])
            if admitted and longest * (len(admitted) + 1) > _PREFILL_TOKENS:
                break
            samples = self._start(self._waiting[0])
            if samples is None:
                break
            self.running += samples
            admitted.append(self._waiting.popleft())
        return admitted, slice(before, len(self.running))

    def evict(self, ended: Sequence[bool]) -> Moves:
        """Free the slots of samples that have ended, one flag a slot; return what moves where."""
        left = len(ended) - sum(ended)
        to = [slot for slot in range(left) if ended[slot]]
        origin = [slot for slot in range(left, len(ended)) if not ended[slot]]
        for free, last in zip(to, origin, strict=True):
            self.running[free] = self.running[last]
        del self.running[left:]
        return Moves(to, origin, left)
