"""Draws from a `Recurrent` network: each sample carries a state, which does not grow with it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.core import tree
from funcrl.generators.contract import Hash, Prompts, hashed, pad_prompts, seeds_of
from funcrl.generators.embedded.batch import Batch
from funcrl.generators.embedded.schedule import Completions, Drawn, Request, completions
from funcrl.models import Recurrent, RecurrentState

# A sequence's last tokens are compared first: for most lengths that already rules a match out.
_TAIL = 8


class Known(NamedTuple):
    """What is known of the first tokens of a prompt: the row of their state, and their hash."""

    row: int = 0
    length: int = 0
    hash: Hash | None = None


class States:
    """States of sequences of tokens; the first row is the state before any token.

    Args:
        zero: the state [L, D] before any token.
        count: the largest number of sequences.
    """

    def __init__(self, zero: RecurrentState, count: int) -> None:
        self._states = tree.map(lambda leaf: leaf.expand(1 + count, -1, -1).clone(), zero)
        self._known: dict[tuple[int, ...], Known] = {}
        self._tails: dict[int, set[tuple[int, ...]]] = {}  # by the lengths of the sequences
        self._used = 1

    def add(
        self, sequences: Sequence[tuple[int, ...]], hashes: Sequence[Hash], states: RecurrentState
    ) -> None:
        """Keep the hash and the state [n, L, D] of each of n sequences."""
        write(self._states, slice(self._used, self._used + len(sequences)), states)
        for tokens, of_tokens in zip(sequences, hashes, strict=True):
            self._known[tokens] = Known(self._used, len(tokens), of_tokens)
            self._tails.setdefault(len(tokens), set()).add(tokens[-_TAIL:])
            self._used += 1

    def find(self, prompts: Prompts) -> list[Known]:
        """Return what is known of each prompt: the longest sequence that it goes on from.

        At least one token follows it; where there is none, nothing is known.
        """
        lengths = sorted(self._tails, reverse=True)
        return [self._find(prompt, lengths) for prompt in prompts]

    def take(self, rows: list[int]) -> RecurrentState:
        """Return a copy of the states [n, L, D] in some rows."""
        return take(self._states, rows)

    def _find(self, prompt: Sequence[int], lengths: Sequence[int]) -> Known:
        for length in lengths:
            if length >= len(prompt):
                continue
            if tuple(prompt[max(length - _TAIL, 0) : length]) in self._tails[length]:
                known = self._known.get(tuple(prompt[:length]))
                if known is not None:
                    return known
        return Known()


def take(states: RecurrentState, rows: list[int] | slice) -> RecurrentState:
    """Return the states in some rows."""
    found: RecurrentState = tree.map(lambda leaf: leaf[rows], states)
    return found


def write(states: RecurrentState, rows: list[int] | slice, new: RecurrentState) -> None:
    """Write states into some rows of others, in place."""
    tree.map(lambda leaf, values: leaf.__setitem__(rows, values), states, new)


class RecurrentDraw:
    """Draws from one network's parameters.

    The states of the samples of a call are kept until the next one, or `forget`: a prompt that
    continues such a sample, as the turns of an environment do, costs the tokens that are new.
    """

    def __init__(self, model: Recurrent) -> None:
        self._model = model
        self.forget()

    def forget(self) -> None:
        """Let go of the states of earlier samples."""
        self._kept = States(self._model.zero_state(), 0)

    def __call__(self, request: Request) -> Completions:
        """Return the samples, each drawn to its end."""
        prompts, group = request.prompts, request.sampling.num_samples
        before = self._kept  # another thread's call may put others there
        found = before.find(prompts)
        kept = States(self._model.zero_state(), group * len(prompts))
        unread = [prompt[each.length :] for prompt, each in zip(prompts, found, strict=True)]
        hashes = [hashed(new, each.hash) for new, each in zip(unread, found, strict=True)]
        states = before.take([each.row for each in found])

        def open_decoder(rows: int, _places: int) -> RecurrentDecoder:
            contexts = PromptStates(prompts, hashes, unread, states)
            return RecurrentDecoder(self._model, contexts, kept, rows)

        leaf = self._model.embed.weight
        seeds, lengths = seeds_of(hashes, group, request.seed), [len(new) for new in unread]
        batch = Batch(
            open_decoder, request, leaf.device, self._model.ops.log_softmax, seeds, lengths
        )
        drawn = batch.run()
        self._kept = kept
        return completions(drawn, leaf)


class PromptStates(NamedTuple):
    """N prompts, the hash of each, those of its tokens that are to be read, the states before."""

    prompts: Prompts
    hashes: Sequence[Hash]
    unread: Prompts
    states: RecurrentState  # [N, L, D]


class RecurrentDecoder:
    """A `Recurrent` bound to its parameters, and the states of the samples.

    Args:
        model: bound to its parameters.
        contexts: the prompts, which are admitted in their order.
        kept: where the states of samples that end are put.
        rows: the largest number of samples at a time.
    """

    def __init__(self, model: Recurrent, contexts: PromptStates, kept: States, rows: int) -> None:
        self._model, self._contexts, self._kept = model, contexts, kept
        self._num_read = 0
        zero = model.zero_state()
        self._states = tree.map(lambda leaf: leaf.expand(rows, -1, -1).clone(), zero)

    def prefill(self, prompts: Prompts, rows: slice, group: int) -> Tensor:
        """Read what is new of the prompts, and share the states that they leave."""
        places = slice(self._num_read, self._num_read + len(prompts))
        self._num_read = places.stop
        before = take(self._contexts.states, places)
        states = read_on(self._model, self._contexts.unread[places], before)
        shared = tree.map(lambda leaf: leaf.repeat_interleave(group, dim=0), states)
        write(self._states, rows, shared)
        return self._model.next_logits(shared)

    def decode(self, tokens: Tensor, positions: Tensor, longest: int) -> Tensor:
        """Read one more token of each sample."""
        del positions, longest
        rows = slice(len(tokens))
        _, states = self._model.read(tokens[:, None], take(self._states, rows))
        write(self._states, rows, states)
        return self._model.next_logits(states)

    def evict(self, rows: list[int], samples: list[Drawn]) -> None:
        """Keep the states of samples that have ended: their last tokens have not been read."""
        prompts, hashes = self._contexts.prompts, self._contexts.hashes
        read = [each.tokens[:-1] for each in samples]
        pairs = list(zip(samples, read, strict=True))
        self._kept.add(
            [(*prompts[each.prompt], *tokens) for each, tokens in pairs],
            [hashed(tokens, hashes[each.prompt]) for each, tokens in pairs],
            take(self._states, rows),
        )

    def move(self, to: list[int], origin: list[int], places: slice) -> None:
        """Copy the states of some samples to other rows."""
        del places
        write(self._states, to, take(self._states, origin))


def read_on(model: Recurrent, prompts: Prompts, states: RecurrentState) -> RecurrentState:
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
    states = take(states, order)
    start = 0
    for stop in sorted({*lengths}):
        going = slice(sum(length >= stop for length in lengths))
        _, after = model.read(tokens[going, start:stop], take(states, going))
        write(states, going, after)
        start = stop
    return take(states, sorted(range(len(order)), key=order.__getitem__))
