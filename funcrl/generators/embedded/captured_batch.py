"""The host's part: which samples are drawn, while the device draws on without waiting."""

from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.generators.contract import pad_prompts, sample_seeds
from funcrl.generators.embedded.pages import SCRAP, SIZE, Pages, limit_of, num_pages
from funcrl.generators.embedded.program import Admitted, Program
from funcrl.generators.embedded.schedule import Request, Schedule
from funcrl.generators.stops import has_stop_string


class HostCopy(NamedTuple):
    """A copy of some samples' numbers from a device to the host, which may still be under way."""

    samples: list[int]
    numbers: Tensor  # [n, ...]
    event: torch.cuda.Event | None  # after which the numbers are there

    def wait(self) -> list[list[int]]:
        """Return the numbers, once they are there."""
        if self.event is not None:
            self.event.synchronize()
        found: list[list[int]] = self.numbers.tolist()
        return found


def copy_to_host(samples: list[int], numbers: Tensor) -> HostCopy:
    """Start to copy integers [n, ...] of samples to the host."""
    if numbers.device.type != "cuda":
        return HostCopy(samples, numbers.cpu().clone(), None)
    host = torch.empty(numbers.shape, dtype=numbers.dtype, device="cpu", pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return HostCopy(samples, host, event)


class HostTokens:
    """The tokens of samples as the host knows them, and where a stop string ends one."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._tokens: dict[int, list[int]] = {}
        self.ends: dict[int, int] = {}  # the length of each sample that a stop string ends

    def read(self, sample: int, count: int, last: list[int]) -> bool:
        """Add a sample's new tokens; return whether a stop string has ended it."""
        tokens = self._tokens.setdefault(sample, [])
        new = last[len(last) - (count - len(tokens)) :]
        for token in new:
            if sample in self.ends:
                break
            tokens.append(token)
            if self._request.listen is not None:
                self._request.listen(sample, token)
            if has_stop_string(tokens, self._request.sampling, self._request.decode):
                self.ends[sample] = len(tokens)
        return sample in self.ends


# Tokens of each sample between two reads of what has ended. The device has that many queued while
# the host does its part, and a sample that ends is noticed up to twice as many tokens later.
_BURST = 4


@dataclass
class Running:
    """A sample in a slot."""

    sample: int
    table: list[int]  # its pages
    left: int  # tokens until it ends at the latest


class CapturedBatch:
    """A request while it is drawn; after `run` the program has the results."""

    def __init__(self, program: Program, request: Request) -> None:
        self.program, self.request, self.sampling = program, request, request.sampling
        self.seeds = sample_seeds(request.prompts, self.sampling.num_samples, request.seed)
        self.schedule = Schedule(request, self._start)
        self.pages = Pages(program.sizes.pages)
        is_read = self.sampling.stop or request.listen is not None
        self.host_tokens = HostTokens(request) if is_read else None
        self._copies: deque[HostCopy] = deque()
        self._shared: list[int] = []  # the samples of which the program knows the groups

    def run(self) -> dict[int, int]:
        """Draw all samples; return the length of each that a stop string ends."""
        self.program.begin()
        while not self.schedule.is_done:
            self._prefill()
            self._decode()
            # The one before: its numbers are there, or soon, while the device has this one to do.
            ended = self._ended(self._copies.popleft()) if len(self._copies) > 1 else set()
            self._evict(ended)
        for copy in self._copies:
            self._ended(copy)
        return {} if self.host_tokens is None else self.host_tokens.ends

    def _start(self, prompt: int) -> list[Running] | None:
        """Return the samples of a prompt with their pages; None if there are not enough pages."""
        if num_pages(self.request, prompt) > self.pages.num_free:
            return None
        left = limit_of(self.request, prompt) - 1  # the first token comes with the prefill
        first = prompt * self.sampling.num_samples
        tables = self.pages.take(self.request, prompt)
        return [Running(first + number, table, left) for number, table in enumerate(tables)]

    def _prefill(self) -> None:
        """Admit prompts while there is room, and run them."""
        while (admitted := self.schedule.admit())[0]:
            prompts, rows = admitted
            entry = self._entry(prompts, self.schedule.running[rows])
            self.program.prefill(rows.start, entry, self.sampling, self.request.max_tokens)

    def _entry(self, indices: list[int], samples: list[Running]) -> Admitted:
        """Return what the program has to know of admitted prompts, and of their samples."""
        prompts = [self.request.prompts[prompt] for prompt in indices]
        group = self.sampling.num_samples
        copies = []
        for index, prompt in enumerate(prompts):
            if len(prompt) % SIZE:  # the last page is written by the first sample
                page = len(prompt) // SIZE
                first, *others = samples[index * group : (index + 1) * group]
                copies += [(first.table[page], other.table[page]) for other in others]
        width = max(len(each.table) for each in samples)
        return Admitted(
            prompts=pad_prompts(prompts, max(map(len, prompts))),
            lengths=[len(prompt) for prompt in prompts],
            seeds=[self.seeds[each.sample] for each in samples],
            limits=[each.left + 1 for each in samples],
            owners=[each.sample for each in samples],
            tables=[each.table + [SCRAP] * (width - len(each.table)) for each in samples],
            copies=copies,
        )

    def _decode(self) -> None:
        """Draw some tokens of each sample, and start to read what has come of it."""
        running = self.schedule.running
        steps = min(_BURST, max(each.left for each in running))
        self._share()
        for _ in range(steps):
            self.program.decode(len(running), self.sampling)
        for each in running:
            each.left -= steps
        window = 0 if self.host_tokens is None else _BURST + 1
        numbers = self.program.numbers(len(running), window)
        self._copies.append(copy_to_host([each.sample for each in running], numbers))

    def _share(self) -> None:
        """Tell the program which slots have samples of one prompt, if that has changed."""
        samples = [each.sample for each in self.schedule.running]
        if samples == self._shared:
            return
        self._shared, group = samples, self.sampling.num_samples
        groups: dict[int, list[int]] = {}
        for slot, sample in enumerate(samples):
            groups.setdefault(sample // group, []).append(slot)
        self.program.share([slots + [-1] * (group - len(slots)) for slots in groups.values()])

    def _ended(self, copy: HostCopy) -> set[int]:
        """Return the samples that had ended when their numbers were copied."""
        ended = set()
        for sample, (position, count, *tokens) in zip(copy.samples, copy.wait(), strict=True):
            host = self.host_tokens
            stopped = host is not None and host.read(sample, count, tokens)
            if position < 0 or stopped:
                ended.add(sample)
        return ended

    def _evict(self, ended: set[int]) -> None:
        """Free the slots and the pages of samples that have ended."""
        running = [*self.schedule.running]
        gone = [each.sample in ended or each.left <= 0 for each in running]
        if not any(gone):
            return
        moves = self.schedule.evict(gone)
        self.program.move(moves.to, moves.origin, moves.left)
        for each, is_gone in zip(running, gone, strict=True):
            if is_gone:
                self.pages.give_back(each.table)
