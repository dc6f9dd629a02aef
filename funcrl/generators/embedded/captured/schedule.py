"""The host's part: which samples are under way, while the device draws on without waiting."""

from collections import deque
from dataclasses import dataclass

from funcrl.generators.embedded.captured.extend import SCRAP, SIZE
from funcrl.generators.embedded.captured.looks import Look, look_at
from funcrl.generators.embedded.captured.pages import Pages, limit_of, num_pages
from funcrl.generators.embedded.captured.program import Entering, Program
from funcrl.generators.embedded.captured.texts import Texts
from funcrl.generators.embedded.drawn import Request
from funcrl.generators.embedded.entering import pad_prompts, take_waiting
from funcrl.generators.prompts import sample_seeds

# Tokens of each sample between two looks at what has ended. The device has that many queued while
# the host does its part, and a sample that ends is noticed up to twice as many tokens later.
_BURST = 4


@dataclass
class Running:
    """A sample under way."""

    sample: int
    table: list[int]  # its pages
    left: int  # tokens until it ends at the latest


class Schedule:
    """A request while it is drawn; after `run` the program has the results.

    The samples under way are in the first slots, in the order of `running`.
    """

    def __init__(self, program: Program, request: Request) -> None:
        self.program, self.request = program, request
        self.sampling = request.sampling
        self.seeds = sample_seeds(request.prompts, self.sampling.num_samples, request.seed)
        self.slots = max(request.slots, self.sampling.num_samples)
        self.waiting = deque(range(len(request.prompts)))
        self.lengths = [len(prompt) for prompt in request.prompts]
        self.pages = Pages(program.sizes.pages)
        self.running: list[Running] = []
        self.texts = Texts(request) if self.sampling.stop else None
        self._looks: deque[Look] = deque()
        self._shared: list[int] = []  # the samples of which the program knows the groups

    def run(self) -> dict[int, int]:
        """Draw all samples; return the length of each that a stop string ends."""
        self.program.begin()
        while self.waiting or self.running:
            self._enter()
            self._burst()
            # The one before: its numbers are there, or soon, while the device has this one to do.
            ended = self._ended(self._looks.popleft()) if len(self._looks) > 1 else set()
            self._leave(ended)
        for look in self._looks:
            self._ended(look)
        return {} if self.texts is None else self.texts.ends

    def _enter(self) -> None:
        """Let prompts enter while there is room."""
        start = len(self.running)
        while entering := take_waiting(self.waiting, self.lengths, self._admit):
            entry = self._entry(entering, self.running[start:])
            self.program.enter(start, entry, self.sampling, self.request.max_tokens)
            start = len(self.running)

    def _admit(self, prompt: int) -> bool:
        """Give slots and pages to the samples of a prompt, if there are enough of both."""
        request, group = self.request, self.sampling.num_samples
        if len(self.running) + group > self.slots:
            return False
        if num_pages(request, prompt) > self.pages.num_free:
            return False
        left = limit_of(request, prompt) - 1  # the first token comes with the prompt
        for number, table in enumerate(self.pages.take(request, prompt)):
            self.running.append(Running(prompt * group + number, table, left))
        return True

    def _entry(self, entering: list[int], samples: list[Running]) -> Entering:
        """Return what the program has to know of prompts that enter, and of their samples."""
        prompts = [self.request.prompts[prompt] for prompt in entering]
        group = self.sampling.num_samples
        copies = []
        for index, prompt in enumerate(prompts):
            if len(prompt) % SIZE:  # the last page is written by the first sample
                page = len(prompt) // SIZE
                first, *others = samples[index * group : (index + 1) * group]
                copies += [(first.table[page], other.table[page]) for other in others]
        width = max(len(each.table) for each in samples)
        return Entering(
            prompts=pad_prompts(prompts, max(map(len, prompts))),
            lengths=[len(prompt) for prompt in prompts],
            seeds=[self.seeds[each.sample] for each in samples],
            limits=[each.left + 1 for each in samples],
            owners=[each.sample for each in samples],
            tables=[each.table + [SCRAP] * (width - len(each.table)) for each in samples],
            copies=copies,
        )

    def _burst(self) -> None:
        """Draw some tokens of each sample, and start to look at what has come of it."""
        count, steps = len(self.running), min(_BURST, max(each.left for each in self.running))
        self._share()
        for _ in range(steps):
            self.program.step(count, self.sampling)
        for each in self.running:
            each.left -= steps
        samples = [each.sample for each in self.running]
        numbers = self.program.numbers(count, 0 if self.texts is None else _BURST + 1)
        self._looks.append(look_at(samples, numbers))

    def _share(self) -> None:
        """Tell the program which slots have samples of one prompt, if that has changed."""
        samples = [each.sample for each in self.running]
        if samples == self._shared:
            return
        self._shared, group = samples, self.sampling.num_samples
        groups: dict[int, list[int]] = {}
        for slot, sample in enumerate(samples):
            groups.setdefault(sample // group, []).append(slot)
        self.program.share([slots + [-1] * (group - len(slots)) for slots in groups.values()])

    def _ended(self, look: Look) -> set[int]:
        """Return the samples that had ended when their numbers were copied."""
        ended = set()
        for sample, (position, count, *tokens) in zip(look.samples, look.wait(), strict=True):
            stopped = self.texts is not None and self.texts.read(sample, count, tokens)
            if position < 0 or stopped:
                ended.add(sample)
        return ended

    def _leave(self, ended: set[int]) -> None:
        """Free the slots of samples that have ended: the last samples move there."""
        gone = [each.sample in ended or each.left <= 0 for each in self.running]
        if not any(gone):
            return
        left = len(self.running) - sum(gone)
        free = [slot for slot in range(left) if gone[slot]]
        moved = [slot for slot in range(left, len(gone)) if not gone[slot]]
        self.program.move(free, moved, left)
        for slot, each in enumerate(self.running):
            if gone[slot]:
                self.pages.give_back(each.table)
        for to, origin in zip(free, moved, strict=True):
            self.running[to] = self.running[origin]
        del self.running[left:]
