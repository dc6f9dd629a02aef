"""Many samples drawn together: prompts enter while others are under way, finished ones leave."""

import math
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import rng
from funcrl.generators.embedded.cache import empty_cache, extend, prefill
from funcrl.generators.embedded.draw import draw_tokens
from funcrl.generators.prompts import Prompts, sample_seeds
from funcrl.generators.stops import DecodeFn, has_stop_string
from funcrl.models import Transformer

# Padded prompt tokens in one forward pass, so that its activations stay bounded.
_PREFILL_TOKENS = 16384


class Drawn(NamedTuple):
    """One sample, growing while it is drawn."""

    prompt: int  # its index
    tokens: list[int]
    logprobs: list[float]
    policy_logprobs: list[float]


class Batch:
    """The samples under way, one a slot: the first `active` rows of every tensor.

    A sample that ends gives its slot to the last one, so that the rows stay without gaps and a
    finished sample costs nothing.
    """

    def __init__(
        self,
        network: Transformer,
        prompts: Prompts,
        sampling: Sampling,
        seed: int,
        decode: DecodeFn | None,
        slots: int,
    ) -> None:
        self.network, self.prompts, self.sampling, self.decode = network, prompts, sampling, decode
        self.seeds = sample_seeds(prompts, sampling.num_samples, seed)
        weight = network.norm.weight
        group = sampling.num_samples
        slots = min(max(slots, group), group * len(prompts))
        # The last token of a sample is never fed back.
        longest = max(map(len, prompts)) + sampling.max_tokens - 1
        self.places = min(longest, network.config.context_length)
        self.cache = empty_cache(network, slots, self.places, weight)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=weight.device)
        self.positions = torch.zeros_like(self.tokens)  # where the token in `tokens` stands
        self.counts = torch.zeros_like(self.tokens)  # tokens drawn so far
        self.most = min(sampling.max_tokens, network.config.context_length)
        self.uniforms = torch.zeros(slots, self.most, dtype=torch.float64, device=weight.device)
        self.waiting = deque(range(len(prompts)))
        self.slots = slots
        self.samples: list[int] = []  # which sample is in each active slot
        self.drawn = [Drawn(row // group, [], [], []) for row in range(group * len(prompts))]
        self.reasons = [""] * len(self.drawn)

    def run(self) -> None:
        """Draw every sample to its end."""
        while self.waiting or self.samples:
            room = (self.slots - len(self.samples)) // self.sampling.num_samples
            entering = _take_waiting(self.waiting, self.prompts, room)
            if entering:
                start = len(self.samples)
                logits = self._enter(entering)
            else:
                start = 0
                logits = self._extend()
            self._draw(logits, start)
            self._leave(start)

    def _enter(self, entering: list[int]) -> Tensor:
        """Run the prompts once, share what they leave with their samples; logits of each sample."""
        group, device = self.sampling.num_samples, self.tokens.device
        prompts = [self.prompts[index] for index in entering]
        width = max(map(len, prompts))
        padded = _pad(prompts, width)
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        prefix = prefill(self.network, torch.tensor(padded, device=device), lengths)
        start = len(self.samples)
        self.samples += [index * group + k for index in entering for k in range(group)]
        rows = slice(start, len(self.samples))
        for layer, pairs in zip(self.cache, prefix.pairs, strict=True):
            layer[rows, :, :width] = pairs.repeat_interleave(group, dim=0)
        # One before the place of the first drawn token: `_draw` moves on.
        self.positions[rows] = (lengths - 1).repeat_interleave(group)
        self.counts[rows] = 0
        seeds = torch.tensor([self.seeds[sample] for sample in self.samples[rows]], device=device)
        self.uniforms[rows] = rng.uniform(seeds, self.most)
        return prefix.logits.repeat_interleave(group, dim=0)

    def _extend(self) -> Tensor:
        rows = slice(len(self.samples))
        longest = max(self._length(sample) for sample in self.samples) - 1
        return extend(self.network, self.cache, self.tokens[rows], self.positions[rows], longest)

    def _draw(self, logits: Tensor, start: int) -> None:
        """Draw the next token of the samples from slot `start` on."""
        rows = slice(start, len(self.samples))
        numbers = self.uniforms[rows].gather(1, self.counts[rows, None]).squeeze(1)
        tokens, chosen, raw = draw_tokens(logits, self.counts[rows], numbers, self.sampling)
        self.tokens[rows] = tokens
        self.positions[rows] += 1
        self.counts[rows] += 1
        columns = zip(tokens.tolist(), chosen.tolist(), raw.tolist(), strict=True)
        for sample, column in zip(self.samples[rows], columns, strict=True):
            _append(self.drawn[sample], *column)

    def _leave(self, start: int) -> None:
        """Free the slots of the samples that have ended, from slot `start` on."""
        ended = []
        for slot in range(start, len(self.samples)):
            sample = self.samples[slot]
            full = self._length(sample) >= self.network.config.context_length
            reason = _finish_reason(self.drawn[sample].tokens, full, self.sampling, self.decode)
            if reason:
                self.reasons[sample] = reason
                ended.append(slot)
        self._close_gaps(ended)

    def _close_gaps(self, ended: list[int]) -> None:
        """Move the last samples to the free slots before them, all at once."""
        left = len(self.samples) - len(ended)
        moved = sorted(set(range(left, len(self.samples))) - set(ended))
        free = ended[: len(moved)]  # ascending, so that these are the ones before `left`
        if moved:
            filled = slice(max(self._length(self.samples[slot]) for slot in moved) - 1)
            self.cache[:, free, :, filled] = self.cache[:, moved, :, filled]
            for values in (self.tokens, self.positions, self.counts, self.uniforms):
                values[free] = values[moved]
        for to, origin in zip(free, moved, strict=True):
            self.samples[to] = self.samples[origin]
        del self.samples[left:]

    def _length(self, sample: int) -> int:
        drawn = self.drawn[sample]
        return len(self.prompts[drawn.prompt]) + len(drawn.tokens)


def _pad(prompts: Prompts, width: int) -> list[list[int]]:
    """Return the prompts padded on the right with a token of their own.

    Another token's keys must not touch a prompt, not even hidden: 0 times infinity is not 0.
    """
    return [[*prompt, *[prompt[-1]] * (width - len(prompt))] for prompt in prompts]


def _append(drawn: Drawn, token: int, logprob: float, policy_logprob: float) -> None:
    if not (math.isfinite(logprob) and math.isfinite(policy_logprob)):
        raise FloatingPointError(
            f"generate expects logits that leave a distribution to draw from, got a "
            f"log-probability of {policy_logprob} after {len(drawn.tokens)} tokens of prompt "
            f"{drawn.prompt}; have the parameters diverged?"
        )
    drawn.tokens.append(token)
    drawn.logprobs.append(logprob)
    drawn.policy_logprobs.append(policy_logprob)


def _take_waiting(waiting: deque[int], prompts: Prompts, room: int) -> list[int]:
    """Take the next prompts from the queue, within the room and the limit of prompt tokens."""
    entering: list[int] = []
    longest = 0
    while waiting and len(entering) < room:
        longest = max(longest, len(prompts[waiting[0]]))
        if entering and longest * (len(entering) + 1) > _PREFILL_TOKENS:
            break
        entering.append(waiting.popleft())
    return entering


def _finish_reason(
    tokens: list[int], full: bool, sampling: Sampling, decode: DecodeFn | None
) -> str:
    """Return why a sample ends here, "" when it goes on."""
    if tokens[-1] in sampling.stop_tokens or has_stop_string(tokens, sampling, decode):
        return "stop"
    return "length" if full or len(tokens) == sampling.max_tokens else ""
