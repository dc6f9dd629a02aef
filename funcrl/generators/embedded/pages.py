"""The paged KV cache of the captured sampler: its slots and pages, prefill and decode on them."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.generators.embedded.schedule import Request
from funcrl.models import Transformer, TransformerConfig
from funcrl.ops import AttendFn
from funcrl.ops.exact.paged import Sharing, attend_new


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


SIZE = 64  # attention takes as many keys at a time
SCRAP = 0


def empty_pages(config: TransformerConfig, count: int, like: Tensor) -> Tensor:
    """Return a cache of zeros [L, pages, K, SIZE, 2 C] in the dtype and on the device of `like`.

    A key and its value lie side by side, so that both are written at once.
    """
    shape = (config.num_layers, count, config.num_kv_heads, SIZE, 2 * config.head_width)
    return torch.zeros(shape, dtype=like.dtype, device=like.device)


def extend_paged(
    network: Transformer,
    cache: Tensor,
    tokens: Tensor,
    positions: Tensor,
    tables: Tensor,
    sharing: Sharing,
) -> Tensor:
    """Return logits [n, V] after one more token of each row, whose keys and values are written.

    All work is queued on the device, and no value is read by the host.

    Args:
        network: of the exact operations, bound to its parameters.
        cache: [L, pages, K, SIZE, 2 C], which belongs to the caller.
        tokens: [n].
        positions: [n] where each token stands in its sample, -1 for a row without a sample.
        tables: [n, W] the pages of each row.
        sharing: which rows share their first pages.
    """

    def on_layer(layer: Tensor) -> AttendFn:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = q.squeeze(2), k.squeeze(2), v.squeeze(2)
            return attend_new(q, k, v, layer, tables, positions, sharing).unsqueeze(2)

        return attend

    def last_logits(x: Tensor, weight: Tensor) -> Tensor:
        return network.ops.linear(x[:, -1], weight, None)

    logits: Tensor = network(
        tokens[:, None], positions[:, None], attend=list(map(on_layer, cache)), head=last_logits
    )
    return logits


def prefill_paged(
    network: Transformer,
    cache: Tensor,
    prompts: Tensor,
    lengths: Tensor,
    tables: Tensor,
    copies: Tensor,
) -> Tensor:
    """Return logits [N, V] after the last token of each prompt, whose keys and values are written.

    Args:
        network: of the exact operations, bound to its parameters.
        cache: [L, pages, K, SIZE, 2 C], which belongs to the caller.
        prompts: [N, P] tokens, padded on the right.
        lengths: [N] each prompt's own length.
        tables: [N, W] the pages of each prompt.
        copies: [2, m] pages to copy once they are written, and the pages to copy them to.
    """
    places = torch.arange(prompts.shape[1], device=prompts.device).expand_as(prompts)
    own = places.masked_fill(places >= lengths[:, None], -1)
    written = _places_in_cache(cache, tables, own)
    origin, to = copies

    def on_layer(layer: Tensor) -> AttendFn:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            _write(layer, written, k, v)
            if len(to):
                layer.index_copy_(0, to, layer.index_select(0, origin))
            # Padding stands after a prompt's tokens, so that no token of the prompt sees it.
            return network.ops.attend_prompts(q, k, v)

        return attend

    def next_logits(x: Tensor, weight: Tensor) -> Tensor:
        rows = torch.arange(len(x), device=x.device)
        return network.ops.linear(x[rows, lengths - 1], weight, None)

    logits: Tensor = network(prompts, places, attend=list(map(on_layer, cache)), head=next_logits)
    return logits


def _write(layer: Tensor, written: Tensor, k: Tensor, v: Tensor) -> None:
    """Write keys and values [n, K, P, C] to their places in a layer of the cache."""
    width = layer.shape[-1]
    layer.view(-1, width).index_copy_(0, written, torch.cat([k, v], dim=-1).view(-1, width))


def _places_in_cache(cache: Tensor, tables: Tensor, places: Tensor) -> Tensor:
    """Return the rows [n K P] of a layer, seen as [pages K SIZE, 2 C], of places [n, P]."""
    num_heads = cache.shape[2]
    pages = tables.gather(1, places.clamp(min=0) // SIZE).masked_fill(places < 0, SCRAP)
    heads = torch.arange(num_heads, device=cache.device)[:, None]
    in_page = (places % SIZE)[:, None]
    return ((pages[:, None] * num_heads + heads) * SIZE + in_page).view(-1)
