"""Work that requests ask for, done one after another in a thread, and the generator it shares."""

import threading
import traceback
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Generic, NamedTuple, TypeVar

from funcrl.core.types import Params
from funcrl.generators.embedded.engine import EmbeddedGenerator

Result = TypeVar("Result")
_KEPT = 4096  # results, until the oldest is forgotten: a client may ask for one again


class Failure(NamedTuple):
    """Why a job has no result."""

    message: str
    is_of_user: bool  # what was asked for is wrong, not the server


class _Job(NamedTuple):
    number: int
    run: Callable[[Sequence[Any]], Sequence[Any]]
    argument: Any
    joins: Hashable  # jobs of one kind that wait one behind another are run together; None alone


class Jobs(Generic[Result]):
    """Jobs in the order in which they came; each result can be asked for by its number."""

    def __init__(self) -> None:
        self._waiting: deque[_Job] = deque()
        self._results: OrderedDict[int, Result | Failure] = OrderedDict()
        self._known: OrderedDict[Hashable, int] = OrderedDict()
        self._changed = threading.Condition()
        self._count, self._closed = 0, False
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def add(
        self,
        run: Callable[[Sequence[Any]], Sequence[Result]],
        argument: Any,
        name: Hashable,
        joins: Hashable = None,
    ) -> int:
        """Return the number of a job, that of the same name if a client sends it once more.

        Args:
            run: from the arguments of jobs to their results.
            argument: of this job.
            name: which no other job has; None for a job that no client sends twice.
            joins: jobs in a row with the same are run in one call.
        """
        with self._changed:
            if name in self._known:
                return self._known[name]
            self._count += 1
            if name is not None:
                self._known[name] = self._count
            while len(self._known) > _KEPT:
                self._known.popitem(last=False)
            self._waiting.append(_Job(self._count, run, argument, joins))
            self._changed.notify_all()
            return self._count

    def result(self, number: int, timeout: float, keep: bool = True) -> Result | Failure | None:
        """Return a job's result, None if it has none by then; raise if there is no such job.

        One that is not kept can be asked for once.
        """
        with self._changed:
            if not 0 < number <= self._count or (
                number not in self._results and number <= self._count - _KEPT
            ):
                raise KeyError(number)
            self._changed.wait_for(lambda: number in self._results or self._closed, timeout)
            found = self._results.get(number)
            if not keep:
                self._results.pop(number, None)
            return found

    @property
    def is_closed(self) -> bool:
        """Whether no other job begins."""
        return self._closed

    def close(self) -> None:
        """Begin no other job, and wait for the one that is under way."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join()

    def _work(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return
                jobs = [self._waiting.popleft()]
                joins = jobs[0].joins
                while joins is not None and self._waiting and self._waiting[0].joins == joins:
                    jobs.append(self._waiting.popleft())
            results = self._run(jobs)
            with self._changed:
                numbers = [job.number for job in jobs]
                self._results.update(zip(numbers, results, strict=True))
                while len(self._results) > _KEPT:
                    self._results.popitem(last=False)
                self._changed.notify_all()

    def _run(self, jobs: Sequence[_Job]) -> Sequence[Any]:
        try:
            return jobs[0].run([job.argument for job in jobs])
        except (ValueError, TypeError, OSError) as error:  # what funcrl raises for a wrong argument
            return [Failure(str(error), is_of_user=True)] * len(jobs)
        except Exception:  # a bug, of which the client should hear and the others should not
            return [Failure(traceback.format_exc(), is_of_user=False)] * len(jobs)


class SharedGenerator:
    """A generator, and the jobs that use it: only these push to it and draw from it."""

    def __init__(self, generator: EmbeddedGenerator) -> None:
        self.generator = generator
        self.jobs: Jobs[Any] = Jobs()
        self._pushed: str | None = None

    def push(self, name: str, params: Callable[[], Params]) -> None:
        """Draw from parameters of a name, which are made only if others were pushed last."""
        if self._pushed != name:
            self.generator.push(params())
            self._pushed = name

    def close(self) -> None:
        """Finish the job that is under way, and free what the generator holds."""
        self.jobs.close()
        self.generator.close()
