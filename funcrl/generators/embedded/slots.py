"""Many samples drawn together: prompts enter while others are under way, finished ones leave."""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from funcrl.core import rng
from funcrl.generators.draw import LogSoftmaxFn, draw_tokens
from funcrl.generators.embedded.drawn import Drawn, Request, append_tokens, new_samples
from funcrl.generators.embedded.entering import take_waiting
from funcrl.generators.prompts import Prompts, sample_seeds
from funcrl.ops.arithmetic import log_softmax


class Decoder(Protocol):
    """A network with its parameters, and what it keeps of the samples under way, a row each."""

    def enter(self, prompts: Prompts, rows: slice, group: int) -> Tensor:
        """Fill rows with n prompts, each `group` times; return logits [n * group, V]."""

    def extend(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Add a token at its position to each of the first rows; return logits [rows, V]."""

    def leave(self, rows: list[int], samples: list[Drawn]) -> None:
        """Take note that the samples of some rows have ended; others will have these rows."""

    def move(self, to: list[int], origin: list[int], places: slice) -> None:
        """Copy the places of some rows to other rows."""


OpenFn = Callable[[int, int], Decoder]  # (rows, places) -> an empty decoder


class Batch:
    """The samples under way, one a slot: the first `active` rows of every tensor.

    A sample that ends gives its slot to the last one, so that the rows stay without gaps and a
    finished sample costs nothing. Prompts enter in their order.

    Args:
        open_decoder: makes the decoder.
        request: what to draw.
        device: of the parameters.
        log_softmax: of the network's numerics.
        seeds: of all samples, `sample_seeds`, where they are known already.
        unread: tokens of each prompt that the decoder has to read; all of them when left out.
    """

    def __init__(
        self,
        open_decoder: OpenFn,
        request: Request,
        device: torch.device,
        log_softmax: LogSoftmaxFn = log_softmax,
        seeds: Sequence[int] | None = None,
        unread: Sequence[int] | None = None,
    ) -> None:
        self.log_softmax = log_softmax
        prompts, sampling = request.prompts, request.sampling
        self.request, self.sampling = request, sampling
        group = sampling.num_samples
        self.seeds = sample_seeds(prompts, group, request.seed) if seeds is None else seeds
        slots = min(max(request.slots, group), group * len(prompts))
        self.decoder = open_decoder(slots, request.places)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)  # where the token in `tokens` stands
        self.counts = torch.zeros_like(self.tokens)  # tokens drawn so far
        self.most = request.max_tokens
        self.uniforms = torch.zeros(slots, self.most, dtype=torch.float64, device=device)
        self.waiting = deque(range(len(prompts)))
        self.unread = [len(prompt) for prompt in prompts] if unread is None else unread
        self.slots = slots
        self.samples: list[int] = []  # which sample is in each active slot
        self.drawn = new_samples(request)

    def run(self) -> list[Drawn]:
        """Return the samples, each drawn to its end."""
        while self.waiting or self.samples:
            start = len(self.samples)
            entering = take_waiting(self.waiting, self.unread, self._admit)
            if entering:
                logits = self._enter(entering, slice(start, len(self.samples)))
            else:
                start = 0
                logits = self._extend()
            self._draw(logits, start)
            self._leave(start)
        return self.drawn

    def _admit(self, prompt: int) -> bool:
        """Give slots to the samples of a prompt, if there are enough."""
        group = self.sampling.num_samples
        admitted = len(self.samples) + group <= self.slots
        if admitted:
            self.samples += range(prompt * group, (prompt + 1) * group)
        return admitted

    def _enter(self, entering: list[int], rows: slice) -> Tensor:
        """Run the prompts once, share what they leave with their samples; logits of each sample."""
        group, device = self.sampling.num_samples, self.tokens.device
        prompts = [self.request.prompts[index] for index in entering]
        logits = self.decoder.enter(prompts, rows, group)
        # One before the place of the first drawn token: `_draw` moves on.
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        self.positions[rows] = last.repeat_interleave(group)
        self.counts[rows] = 0
        seeds = torch.tensor([self.seeds[sample] for sample in self.samples[rows]], device=device)
        self.uniforms[rows] = rng.uniform(seeds, self.most)
        return logits

    def _extend(self) -> Tensor:
        rows = slice(len(self.samples))
        longest = max(self._length(slot) for slot in range(len(self.samples))) - 1
        return self.decoder.extend(self.tokens[rows], self.positions[rows], longest)

    def _draw(self, logits: Tensor, start: int) -> None:
        """Draw the next token of the samples from slot `start` on."""
        rows = slice(start, len(self.samples))
        numbers = self.uniforms[rows].gather(1, self.counts[rows, None]).squeeze(1)
        drawn = draw_tokens(logits, self.counts[rows], numbers, self.sampling, self.log_softmax)
        self.tokens[rows] = drawn[0]
        self.positions[rows] += 1
        self.counts[rows] += 1
        append_tokens([self.drawn[sample] for sample in self.samples[rows]], drawn)

    def _leave(self, start: int) -> None:
        """Free the slots of the samples that have ended, from slot `start` on."""
        slots = range(start, len(self.samples))
        ended = [slot for slot in slots if self.drawn[self.samples[slot]].end(self.request)]
        if ended:
            self.decoder.leave(ended, [self.drawn[self.samples[slot]] for slot in ended])
            self._close_gaps(ended)

    def _close_gaps(self, ended: list[int]) -> None:
        """Move the last samples to the free slots before them, all at once."""
        left = len(self.samples) - len(ended)
        moved = sorted(set(range(left, len(self.samples))) - set(ended))
        free = ended[: len(moved)]  # ascending, so that these are the ones before `left`
        if moved:
            filled = slice(max(self._length(slot) for slot in moved) - 1)
            self.decoder.move(free, moved, filled)
            for values in (self.tokens, self.positions, self.counts, self.uniforms):
                values[free] = values[moved]
        for to, origin in zip(free, moved, strict=True):
            self.samples[to] = self.samples[origin]
        del self.samples[left:]

    def _length(self, slot: int) -> int:
        return self.drawn[self.samples[slot]].length(self.request)
