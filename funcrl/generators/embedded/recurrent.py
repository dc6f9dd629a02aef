"""Draws from a `Recurrent` network: each sample carries a state, which does not grow with it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from funcrl.core import tree
from funcrl.generators.embedded.drawn import Completions, Drawn, Request, completions
from funcrl.generators.embedded.entering import pad_prompts
from funcrl.generators.embedded.slots import Batch
from funcrl.generators.prompts import Prompts
from funcrl.models import Recurrent, RecurrentState


class States:
    """States of sequences of tokens, by these tokens."""

    def __init__(self) -> None:
        # A sequence's state is a row of those that were added with it.
        self._found: dict[tuple[int, ...], tuple[RecurrentState, int]] = {}
        self._lengths: set[int] = set()

    def add(self, sequences: Sequence[tuple[int, ...]], states: RecurrentState) -> None:
        """Keep the state [n, L, D] of each of n sequences."""
        for row, tokens in enumerate(sequences):
            self._found[tokens] = states, row
            self._lengths.add(len(tokens))

    def find(self, tokens: Sequence[int]) -> tuple[int, RecurrentState | None]:
        """Return the state [L, D] of the longest sequence that the tokens continue, and its length.

        At least one token follows it; 0 and None stand for no such sequence.
        """
        for length in sorted(self._lengths, reverse=True):
            if length < len(tokens) and (found := self._found.get(tuple(tokens[:length]))):
                states, row = found
                state: RecurrentState = tree.map(lambda leaf, row=row: leaf[row], states)
                return length, state
        return 0, None


class RecurrentDraw:
    """Draws from one network's parameters.

    The states of the samples of a call are kept until the next one: a prompt that continues such a
    sample, as the turns of an environment do, costs the tokens that are new.

    Args:
        model: bound to its parameters.
    """

    def __init__(self, model: Recurrent) -> None:
        self._model = model
        self._kept = States()

    def __call__(self, request: Request) -> Completions:
        """Return the samples, each drawn to its end."""
        before, self._kept = self._kept, States()

        def open_decoder(rows: int, _places: int) -> RecurrentDecoder:
            return RecurrentDecoder(self._model, request.prompts, rows, before, self._kept)

        leaf = self._model.embed.weight
        return completions(Batch(open_decoder, request, leaf.device).run(), leaf)


class RecurrentDecoder:
    """A `Recurrent` bound to its parameters, and the states of the samples.

    Args:
        model: bound to its parameters.
        prompts: of the samples.
        rows: the largest number of samples at a time.
        known: states of sequences that prompts may continue.
        kept: where the states of samples that end are put.
    """

    def __init__(
        self, model: Recurrent, prompts: Prompts, rows: int, known: States, kept: States
    ) -> None:
        self._model, self._prompts, self._known, self._kept = model, prompts, known, kept
        self._zeros = model.zero_state()
        self._states = tree.map(lambda leaf: leaf.repeat(rows, 1, 1), self._zeros)

    def enter(self, prompts: Prompts, rows: slice, group: int) -> Tensor:
        """Read the prompts, and share the states that they leave with their samples."""
        found = [self._known.find(prompt) for prompt in prompts]
        before = [self._zeros if state is None else state for _, state in found]
        new = [prompt[seen:] for prompt, (seen, _) in zip(prompts, found, strict=True)]
        states = read(self._model, new, tree.map(lambda *leaves: torch.stack(leaves), *before))
        shared = tree.map(lambda leaf: leaf.repeat_interleave(group, dim=0), states)
        self._write(rows, shared)
        return self._model.next_logits(shared)

    def extend(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Read one more token of each sample."""
        del positions, longest
        rows = slice(len(tokens))
        before = tree.map(lambda leaf: leaf[rows], self._states)
        _, states = self._model.read(tokens[:, None], before)
        self._write(rows, states)
        return self._model.next_logits(states)

    def leave(self, rows: list[int], samples: list[Drawn]) -> None:
        """Keep the states of samples that have ended: their last tokens have not been read."""
        tokens = [(*self._prompts[each.prompt], *each.tokens[:-1]) for each in samples]
        self._kept.add(tokens, self._copied(rows))

    def move(self, to: list[int], origin: list[int], places: slice) -> None:
        """Copy the states of some samples to other rows."""
        del places
        self._write(to, self._copied(origin))

    def _copied(self, rows: list[int]) -> RecurrentState:
        copied: RecurrentState = tree.map(lambda leaf: leaf[rows], self._states)
        return copied

    def _write(self, rows: list[int] | slice, states: RecurrentState) -> None:
        tree.map(lambda own, leaf: own.__setitem__(rows, leaf), self._states, states)


def read(model: Recurrent, prompts: Prompts, states: RecurrentState) -> RecurrentState:
    """Return the state [n, L, D] after the last token of each of n prompts of any lengths.

    Longer prompts come first and shorter ones leave as they end, so that no padding is read.

    Args:
        model: bound to its parameters.
        prompts: of at least one token each.
        states: [n, L, D] before their first tokens.
    """
    lengths = [len(prompt) for prompt in prompts]
    order = sorted(range(len(prompts)), key=lambda row: -lengths[row])
    padded = pad_prompts([prompts[row] for row in order], max(lengths))
    tokens = torch.tensor(padded, device=model.embed.weight.device)
    states = tree.map(lambda leaf: leaf[order], states)
    start = 0
    for stop in sorted({*lengths}):
        going = slice(sum(length >= stop for length in lengths))
        before = tree.map(lambda leaf, rows=going: leaf[rows], states)
        _, after = model.read(tokens[going, start:stop], before)
        states = tree.map(lambda new, old: torch.cat([new, old[len(new) :]]), after, states)
        start = stop
    places = torch.tensor(order).argsort()
    found: RecurrentState = tree.map(lambda leaf: leaf[places.to(leaf.device)], states)
    return found
