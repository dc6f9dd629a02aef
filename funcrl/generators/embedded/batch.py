"""Continuous batching by a decoder that is called from token to token."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from funcrl.core import rng
from funcrl.generators.contract import Prompts, sample_seeds
from funcrl.generators.draw import LogSoftmaxFn, draw_tokens
from funcrl.generators.embedded.schedule import (
    Drawn,
    Moves,
    Request,
    Schedule,
    append_tokens,
    new_samples,
)
from funcrl.ops.arithmetic import log_softmax


class Decoder(Protocol):
    """A network with its parameters, and what it keeps of each sample in a slot, a row each."""

    def prefill(self, prompts: Prompts, rows: slice, group: int) -> Tensor:
        """Fill rows with n prompts, each `group` times; return logits [n * group, V]."""

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Add a token at its position to each of the first rows; return logits [rows, V]."""

    def evict(self, rows: list[int], samples: list[Drawn]) -> None:
        """Take note that the samples of some rows have ended; others will have these rows."""

    def move(self, to: list[int], origin: list[int], places: slice) -> None:
        """Copy the places of some rows to other rows."""


OpenFn = Callable[[int, int], Decoder]  # (rows, places) -> an empty decoder


class Batch:
    """The samples that are drawn, one a slot: the first rows of every tensor."""

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
        self.request, self.sampling = request, request.sampling
        group = self.sampling.num_samples
        self.seeds = sample_seeds(request.prompts, group, request.seed) if seeds is None else seeds
        self.schedule: Schedule[int] = Schedule(
            request, lambda prompt: range(prompt * group, (prompt + 1) * group), unread
        )
        slots = self.schedule.num_slots
        self.decoder = open_decoder(slots, request.places)
        self.tokens = torch.zeros(slots, dtype=torch.int64, device=device)
        self.positions = torch.zeros_like(self.tokens)  # where the token in `tokens` stands
        self.counts = torch.zeros_like(self.tokens)  # tokens drawn so far
        self.uniforms = torch.zeros(slots, request.max_tokens, dtype=torch.float64, device=device)
        self.drawn = new_samples(request)

    def run(self) -> list[Drawn]:
        """Return the samples, each drawn to its end."""
        while not self.schedule.is_done:
            prompts, rows = self.schedule.admit()
            if prompts:
                logits = self._prefill(prompts, rows)
            else:
                rows = slice(len(self.schedule.running))
                logits = self._decode(rows)
            self._draw(logits, rows)
            self._evict(rows)
        return self.drawn

    def _samples(self, rows: slice) -> list[Drawn]:
        return [self.drawn[sample] for sample in self.schedule.running[rows]]

    def _prefill(self, indices: list[int], rows: slice) -> Tensor:
        """Run prompts once, share what they leave with their samples; logits of each sample."""
        group, device = self.sampling.num_samples, self.tokens.device
        prompts = [self.request.prompts[index] for index in indices]
        logits = self.decoder.prefill(prompts, rows, group)
        # One before the place of the first drawn token: `_draw` adds 1.
        last = torch.tensor([len(prompt) - 1 for prompt in prompts], device=device)
        self.positions[rows] = last.repeat_interleave(group)
        self.counts[rows] = 0
        numbers = [self.seeds[sample] for sample in self.schedule.running[rows]]
        seeds = torch.tensor(numbers, device=device)
        self.uniforms[rows] = rng.uniform(seeds, self.uniforms.shape[1])
        return logits

    def _decode(self, rows: slice) -> Tensor:
        positions = self.positions[rows]
        return self.decoder.decode(self.tokens[rows], positions, int(positions.amax()))

    def _draw(self, logits: Tensor, rows: slice) -> None:
        """Draw the next token of the samples in some slots."""
        numbers = self.uniforms[rows].gather(1, self.counts[rows, None]).squeeze(1)
        drawn = draw_tokens(logits, self.counts[rows], numbers, self.sampling, self.log_softmax)
        self.tokens[rows] = drawn[0]
        self.positions[rows] += 1
        self.counts[rows] += 1
        append_tokens(self._samples(rows), drawn)

    def _evict(self, rows: slice) -> None:
        """Free the slots of the samples that have ended, of those that got a token."""
        samples = self._samples(slice(None))
        flags = [False] * (rows.start or 0)
        flags += [each.end(self.request) for each in samples[rows]]
        ended = [slot for slot, end in enumerate(flags) if end]
        if ended:
            self.decoder.evict(ended, [samples[slot] for slot in ended])
            self._move(self.schedule.evict(flags))

    def _move(self, moves: Moves) -> None:
        """Copy the last samples to the free slots before them, all at once."""
        if moves.to:
            longest = int(self.positions[moves.origin].amax())
            self.decoder.move(moves.to, moves.origin, slice(longest))
            for values in (self.tokens, self.positions, self.counts, self.uniforms):
                values[moves.to] = values[moves.origin]
