"""Samples while they are drawn: how one grows, and when it ends."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import numerics
from funcrl.generators.prompts import Prompts
from funcrl.generators.stops import DecodeFn, has_stop_string
from funcrl.rl.batching import pad_rows


class Request(NamedTuple):
    """What a generator in this process is to draw, after its checks."""

    prompts: Prompts
    sampling: Sampling
    seed: int
    decode: DecodeFn | None
    slots: int  # samples drawn at a time
    context_length: int

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

    def __init__(self, prompt: int) -> None:
        self.prompt = prompt  # its index
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

    def length(self, request: Request) -> int:
        """Return the number of tokens of the prompt and the sample together."""
        return len(request.prompts[self.prompt]) + len(self.tokens)

    def end(self, request: Request) -> bool:
        """Set the reason if the sample ends here, and return whether it does."""
        sampling = request.sampling
        full = self.length(request) >= request.context_length
        stopped = self.tokens[-1] in sampling.stop_tokens
        if sampling.stop and not stopped:  # its checks are a fifth of a small model's step
            stopped = has_stop_string(self.tokens, sampling, request.decode)
        if stopped:
            self.reason = "stop"
        elif full or len(self.tokens) == sampling.max_tokens:
            self.reason = "length"
        return bool(self.reason)


def new_samples(request: Request) -> list[Drawn]:
    """Return the samples of a request, group-major, with no tokens yet."""
    group = request.sampling.num_samples
    return [Drawn(row // group) for row in range(group * len(request.prompts))]


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
    """Return the error of a network that left no distribution to draw from.

    Args:
        policy_logprob: of the token that was drawn.
        count: tokens that the sample had before.
        prompt: the index of its prompt.
    """
    return FloatingPointError(
        f"generate expects logits that leave a distribution to draw from, got a "
        f"log-probability of {policy_logprob} after {count} tokens of prompt {prompt}; have the "
        f"parameters diverged?"
    )
