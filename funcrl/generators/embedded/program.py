"""A program: memory at fixed addresses, the functions that run on it, and their CUDA graphs."""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import rng
from funcrl.core.numerics import at_least_float32
from funcrl.generators.draw import draw_tokens
from funcrl.generators.embedded.pages import (
    SIZE,
    Sizes,
    append_token,
    empty_pages,
    empty_results,
    empty_slots,
    extend_paged,
    prefill_paged,
)
from funcrl.graph.capture import recording
from funcrl.models import Transformer
from funcrl.ops.exact.paged import Sharing

# A graph holds some memory of its own: beyond this many, those of older samplings are freed.
_MOST = 256


class Graphs:
    """Runs functions by name: on a GPU the first run is captured, and later ones are replays.

    On other devices a function is called each time. A function must read and write tensors that
    stay where they are, and no value on the host. All graphs share the memory in between, so they
    are replayed one after the other, on one stream at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}

    def run(self, name: Hashable, function: Callable[[], object]) -> None:
        """Run a function, which is the same each time that it has this name."""
        if name in self._graphs:
            self._graphs[name].replay()
            return
        # The first run is an ordinary one: it compiles kernels and chooses products, which a
        # capture cannot, and a capture itself computes nothing.
        function()
        if self._device.type == "cuda":
            if len(self._graphs) == _MOST:
                self.clear()
            self._graphs[name] = self._capture(function)

    def clear(self) -> None:
        """Forget all functions, and free what their graphs hold."""
        self._graphs.clear()

    def _capture(self, function: Callable[[], object]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        pool = next((each.pool() for each in self._graphs.values()), None)
        stream = _stream_of(self._device)
        with recording(graph, pool, stream):
            function()
        return graph


@lru_cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    """Return a stream to capture on, always the same: libraries keep memory for each they meet."""
    return torch.cuda.Stream(device)


class Admitted(NamedTuple):
    """Admitted prompts, as numbers of the host; each has as many samples as any other."""

    prompts: list[list[int]]  # padded on the right
    lengths: list[int]
    seeds: list[int]  # of each sample
    limits: list[int]  # tokens that each sample may get
    owners: list[int]  # the row of each sample's results
    tables: list[list[int]]  # the pages of each sample, padded on the right
    copies: list[tuple[int, int]]  # pages, and where each is copied to once it is written


class Program:
    """The samples in the first slots, their keys and values, and all results.

    Its tensors stay where they are, because graphs read and write them. Nothing here waits for a
    GPU, but a draw with top-p.
    """

    def __init__(self, network: Transformer, sizes: Sizes, graphs: Graphs) -> None:
        leaf = network.norm.weight
        self.sizes = sizes
        self._network, self._graphs = network, graphs
        self._cache = empty_pages(network.config, sizes.pages, leaf)
        self._slots = empty_slots(sizes, leaf.device)
        self.results = empty_results(sizes, leaf.device, at_least_float32(leaf.dtype))
        # Of slots, group by group: in each slot may be the last sample of its group.
        self._members = self._slots.shared.new_full((sizes.slots * sizes.group,), -1)
        self._num_groups = 0
        self._logits: Tensor | None = None

    def begin(self) -> None:
        """Forget all samples."""
        self._slots.positions.fill_(-1)
        self.results.tokens.fill_(-1)

    def prefill(self, start: int, admitted: Admitted, sampling: Sampling, most: int) -> None:
        """Run prompts once, and draw the first token of their samples."""
        send = partial(send_to, device=self._cache.device)
        rows = slice(start, start + len(admitted.seeds))
        group = len(admitted.seeds) // len(admitted.prompts)
        lengths = send(admitted.lengths)
        slots = self._slots.part(rows)
        slots.uniforms[:, :most] = rng.uniform(send(admitted.seeds), most)
        columns = send([admitted.limits, admitted.owners])
        slots.limits.copy_(columns[0])
        slots.owners.copy_(columns[1])
        slots.counts.zero_()
        tables = send(admitted.tables)
        slots.tables[:, : tables.shape[1]] = tables
        slots.shared.copy_((lengths // SIZE).repeat_interleave(group))
        # One before the place of the first drawn token: `append_token` moves on.
        slots.positions.copy_((lengths - 1).repeat_interleave(group))
        logits = prefill_paged(
            self._network,
            self._cache,
            send(admitted.prompts),
            lengths,
            tables[::group],
            send([*admitted.copies]).view(-1, 2).T,
        )
        self._append_token(rows, logits.repeat_interleave(group, dim=0), sampling)

    def decode(self, count: int, sampling: Sampling) -> None:
        """Extend the samples in the first `count` slots by a token each."""
        size, group = bucket(count, self.sizes.slots), sampling.num_samples
        rows = slice(size)
        groups = bucket(self._num_groups, size)
        members = self._members[: groups * group].view(groups, group)
        if sampling.top_p < 1:
            # The draw reads a value on the host, which no graph can.
            logits = self._logits_of(size)
            of_extend = ("extend", size, members.shape)
            self._graphs.run(of_extend, lambda: logits.copy_(self._extend(rows, members)))
            self._append_token(rows, logits, sampling)
        else:
            name = (_constants(sampling), size, members.shape)
            self._graphs.run(
                name, lambda: self._append_token(rows, self._extend(rows, members), sampling)
            )

    def share(self, groups: list[list[int]]) -> None:
        """Say which slots have samples of one prompt; each group has room for as many."""
        members = send_to(groups, self._members.device, torch.int32).view(-1)
        self._num_groups = len(groups)
        self._members.fill_(-1)
        self._members[: len(members)] = members

    def move(self, to: list[int], origin: list[int], left: int) -> None:
        """Move samples to other slots; the slots from `left` on have none afterwards."""
        if to:
            send = partial(send_to, device=self._cache.device)
            targets, sources = send(to), send(origin)
            for values in self._slots:
                values.index_copy_(0, targets, values.index_select(0, sources))
        self._slots.positions[left:] = -1

    def numbers(self, count: int, window: int) -> Tensor:
        """Return [n, 2 + window]: what the host may want to know of the first samples.

        Where the next token stands, -1 for a sample that has ended; how many tokens there are; and
        the last ones of these.
        """
        slots = self._slots.part(slice(count))
        columns = slots.counts[:, None] + torch.arange(-window, 0, device=slots.counts.device)
        tokens = self.results.tokens[slots.owners[:, None], columns.clamp(min=0)]
        return torch.cat([slots.positions[:, None], slots.counts[:, None], tokens], dim=1)

    def _extend(self, rows: slice, members: Tensor) -> Tensor:
        slots = self._slots.part(rows)
        return extend_paged(
            self._network,
            self._cache,
            slots.tokens,
            slots.positions,
            slots.tables,
            Sharing(members, slots.shared),
        )

    def _append_token(self, rows: slice, logits: Tensor, sampling: Sampling) -> None:
        log_softmax = self._network.ops.log_softmax
        draw = partial(draw_tokens, sampling=sampling, log_softmax=log_softmax)
        append_token(self._slots.part(rows), self.results, logits, draw, sampling.stop_tokens)

    def _logits_of(self, size: int) -> Tensor:
        """Return where a graph leaves logits [n, V] for a draw outside of it."""
        if self._logits is None:
            shape = (self.sizes.slots, self._network.config.vocab_size)
            self._logits = torch.empty(shape, dtype=self._cache.dtype, device=self._cache.device)
        return self._logits[:size]


def bucket(count: int, slots: int) -> int:
    """Return the number of slots that a step of `count` samples computes: one of few.

    Powers of two, and from 32 on the numbers half way between two of them.
    """
    size = 1 << (count - 1).bit_length()
    if size > 32 and count <= size // 4 * 3:
        size = size // 4 * 3
    return min(size, slots)


def send_to(
    values: Sequence[object], device: torch.device, dtype: torch.dtype = torch.int64
) -> Tensor:
    """Return integers of the host on a device, without waiting for it."""
    tensor = torch.tensor(values, dtype=dtype, device="cpu")
    if device.type != "cuda" or not tensor.numel():
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _constants(sampling: Sampling) -> tuple[object, ...]:
    """Return the options of a sampling that a captured draw has as constants, not as inputs."""
    s = sampling
    return (s.temperature, s.top_k, s.min_p, s.min_tokens, s.stop_tokens)
