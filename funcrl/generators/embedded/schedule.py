"""Continuous batching on the host: which samples are in which slot, and which prompts wait."""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Generic, NamedTuple, TypeVar

from funcrl.generators.embedded.drawn import Request

# Padded prompt tokens in one prefill, so that its activations stay bounded.
_PREFILL_TOKENS = 16384

Running = TypeVar("Running")  # what the caller keeps of a sample in a slot


class Moves(NamedTuple):
    """How the samples left close the gaps: the slots from `left` on are free afterwards."""

    to: list[int]
    origin: list[int]
    left: int


class Schedule(Generic[Running]):
    """The samples of a request: those that are drawn fill the first slots, without gaps.

    Prompts are admitted in their order, all samples of one together. A sample that is evicted gives
    its slot to the last one, so that a finished sample costs nothing.

    Args:
        request: what is drawn.
        start: of the number of a prompt, what to keep of each of its samples; None if there is no
            memory for them now.
        unread: the tokens of each prompt that a prefill reads; all of them when left out.
    """

    def __init__(
        self,
        request: Request,
        start: Callable[[int], Iterable[Running] | None],
        unread: Sequence[int] | None = None,
    ) -> None:
        self.group = request.sampling.num_samples
        self.num_slots = min(max(request.slots, self.group), self.group * len(request.prompts))
        self.running: list[Running] = []
        self._waiting = deque(range(len(request.prompts)))
        self._unread = [len(each) for each in request.prompts] if unread is None else unread
        self._start = start

    @property
    def is_done(self) -> bool:
        """Whether no sample is drawn and no prompt waits."""
        return not self._waiting and not self.running

    def admit(self) -> tuple[list[int], slice]:
        """Give slots to the samples of waiting prompts, as many as fit and one prefill can read.

        Returns the prompts, and the slots of their samples.
        """
        before, longest = len(self.running), 0
        admitted: list[int] = []
        while self._waiting and len(self.running) + self.group <= self.num_slots:
            longest = max(longest, self._unread[self._waiting[0]])
            if admitted and longest * (len(admitted) + 1) > _PREFILL_TOKENS:
                break
            samples = self._start(self._waiting[0])
            if samples is None:
                break
            self.running += samples
            admitted.append(self._waiting.popleft())
        return admitted, slice(before, len(self.running))

    def evict(self, ended: Sequence[bool]) -> Moves:
        """Free the slots of samples that have ended, one flag a slot; return what moves where."""
        left = len(ended) - sum(ended)
        to = [slot for slot in range(left) if ended[slot]]
        origin = [slot for slot in range(left, len(ended)) if not ended[slot]]
        for free, last in zip(to, origin, strict=True):
            self.running[free] = self.running[last]
        del self.running[left:]
        return Moves(to, origin, left)
