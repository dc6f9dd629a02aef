"""How much a request needs, and which pages of the cache belong to which sample."""

from typing import NamedTuple

from funcrl.generators.embedded.captured.extend import SCRAP, SIZE
from funcrl.generators.embedded.drawn import Request


class Sizes(NamedTuple):
    """The sizes of a program's memory."""

    slots: int  # samples under way at a time
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
    """Return the sizes that a request needs: its largest prompts may all be under way at once."""
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
