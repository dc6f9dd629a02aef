"""The memory of the captured sampler: slots, results, and the pages of the KV cache."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.generators.embedded.captured.extend import SCRAP, SIZE
from funcrl.generators.embedded.drawn import Request


class Sizes(NamedTuple):
    """The sizes of a program's memory."""

    slots: int  # samples drawn at a time
    samples: int
    pages: int
    width: int  # pages of one sample
    most: int  # tokens of a completion
    group: int  # samples of one prompt

    def covers(self, other: "Sizes") -> bool:
        """Return whether what needs the other sizes fits into these."""
        return all(mine >= theirs for mine, theirs in zip(self, other, strict=True))

    def joined(self, other: "Sizes") -> "Sizes":
        """Return sizes that cover both."""
        return Sizes(*map(max, self, other))


def sizes_of(request: Request) -> Sizes:
    """Return the sizes that a request needs: its largest prompts may all be drawn at once."""
    group = request.sampling.num_samples
    samples = group * len(request.prompts)
    slots = min(max(request.slots, group), samples)
    needs = sorted(num_pages(request, index) for index in range(len(request.prompts)))
    return Sizes(
        slots=slots,
        samples=samples,
        pages=1 + sum(needs[-(slots // group) :]),
        width=-(-request.places // SIZE),
        most=request.max_tokens,
        group=group,
    )


def num_pages(request: Request, prompt: int) -> int:
    """Return the pages that the samples of a prompt need together."""
    shared, own = _parts(request, prompt)
    return shared + request.sampling.num_samples * own


def limit_of(request: Request, prompt: int) -> int:
    """Return the largest number of tokens of a completion of a prompt."""
    room = request.context_length - len(request.prompts[prompt])
    return min(request.sampling.max_tokens, room)


class Pages:
    """The pages of a cache: those that are free, and how many samples hold each of the others.

    A sample holds all that its longest completion needs from the start, so that it never waits.
    """

    def __init__(self, count: int) -> None:
        self._holders = [0] * count
        self._free = [page for page in reversed(range(count)) if page != SCRAP]

    @property
    def num_free(self) -> int:
        """The number of pages that no sample holds."""
        return len(self._free)

    def take(self, request: Request, prompt: int) -> list[list[int]]:
        """Return the table of each sample of a prompt; the prompt's whole pages are shared."""
        shared, own = _parts(request, prompt)
        samples = request.sampling.num_samples
        first = self._hold(shared, samples)
        return [first + self._hold(own, 1) for _ in range(samples)]

    def give_back(self, table: list[int]) -> None:
        """Free those pages of a sample that no other sample holds."""
        for page in table:
            self._holders[page] -= 1
            if not self._holders[page]:
                self._free.append(page)

    def _hold(self, count: int, holders: int) -> list[int]:
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = holders
        return pages


def _parts(request: Request, prompt: int) -> tuple[int, int]:
    """Return how many pages the samples of a prompt share, and how many each has alone."""
    length = len(request.prompts[prompt])
    fed = length + limit_of(request, prompt) - 1  # a sample's last token is not
    return length // SIZE, -(-fed // SIZE) - length // SIZE


# (logits [n, V], counts [n], uniform numbers [n]) -> tokens, their log-probabilities as drawn, and
# those under the policy itself, each [n]
DrawTokensFn: TypeAlias = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


class Slots(NamedTuple):
    """What is known of the sample in each slot; a position of -1 says that there is none."""

    tokens: Tensor  # [S] the token that is fed next
    positions: Tensor  # [S] where that token stands; -1 once the sample has ended
    counts: Tensor  # [S] tokens drawn so far
    limits: Tensor  # [S] tokens that the sample may get
    owners: Tensor  # [S] the row of the sample's results
    uniforms: Tensor  # [S, most] float64
    tables: Tensor  # [S, W] the pages of the sample
    shared: Tensor  # [S] int32, how many of its pages, the first ones, it shares with its group

    def part(self, rows: slice) -> "Slots":
        """Return views of some slots."""
        return Slots(*(each[rows] for each in self))


class Results(NamedTuple):
    """What was drawn of each sample; the last row takes what belongs to none."""

    tokens: Tensor  # [samples + 1, most], -1 where none is drawn
    logprobs: Tensor  # [samples + 1, most] under the distribution that was sampled from
    policy_logprobs: Tensor  # [samples + 1, most]


def empty_slots(sizes: Sizes, device: torch.device) -> Slots:
    """Return slots without samples."""
    tokens, positions, counts, limits, owners = (
        torch.zeros(sizes.slots, dtype=torch.int64, device=device) for _ in range(5)
    )
    uniforms = torch.zeros(sizes.slots, sizes.most, dtype=torch.float64, device=device)
    tables = torch.zeros(sizes.slots, sizes.width, dtype=torch.int64, device=device)
    shared = torch.zeros(sizes.slots, dtype=torch.int32, device=device)
    return Slots(tokens, positions.fill_(-1), counts, limits, owners, uniforms, tables, shared)


def empty_results(sizes: Sizes, device: torch.device, dtype: torch.dtype) -> Results:
    """Return results without tokens, with log-probabilities of a dtype."""
    shape = (sizes.samples + 1, sizes.most)
    tokens = torch.full(shape, -1, dtype=torch.int64, device=device)
    logprobs = torch.zeros(shape, dtype=dtype, device=device)
    return Results(tokens, logprobs, logprobs.clone())


def append_token(
    slots: Slots,
    results: Results,
    logits: Tensor,
    draw_tokens: DrawTokensFn,
    stop_tokens: Sequence[int],
) -> None:
    """Draw the next token of each slot, write it to the results, and end what it ends.

    All work is queued on the device, and no value is read by the host. A sample ends with a stop
    token, with its last possible token, or where no distribution was left to draw from.

    Args:
        slots: n slots, written in place.
        results: written in place.
        logits: [n, V].
        draw_tokens: how to draw.
        stop_tokens: the tokens that end a sample.
    """
    alive = slots.positions >= 0
    num_rows, most = results.tokens.shape
    # Where a sample has ended, its count may be past the last column.
    column = slots.counts.clamp(max=most - 1)
    numbers = slots.uniforms.gather(1, column[:, None]).squeeze(1)
    drawn = draw_tokens(logits, slots.counts, numbers)
    row = slots.owners.masked_fill(~alive, num_rows - 1)
    for result, values in zip(results, drawn, strict=True):
        result.index_put_((row, column), values)
    tokens, logprobs, policy_logprobs = drawn
    slots.counts.add_(alive)
    ended = (slots.counts >= slots.limits) | ~(logprobs + policy_logprobs).isfinite()
    for stop in stop_tokens:
        ended = ended | (tokens == stop)
    slots.tokens.copy_(tokens)
    slots.positions.copy_((slots.positions + 1).masked_fill(ended | ~alive, -1))
