"""When rollouts are drawn: each before its own step, or while earlier steps train."""

import contextvars
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from funcrl.config import TrainConfig
from funcrl.core import tree
from funcrl.core.types import Params
from funcrl.loop.build import Parts, whole_params
from funcrl.loop.rollouts.roll import Policy, Rolled, prompts_of, roll, whole_policy
from funcrl.loop.supervised import answers_of
from funcrl.run.follower import Follower

_Result = TypeVar("_Result")
_PATIENCE = 2.0  # seconds until the end of a run says what it waits for


class Rollouts(Protocol):
    """The rollouts of a run, in the order of its steps."""

    @property
    def older(self) -> Sequence[Params]:
        """What was trained after earlier steps and draws rollouts to come, oldest first."""

    @property
    def newest(self) -> Policy:
        """The policy that was given last."""

    def give(self, version: int, trained: Params) -> None:
        """Take what a step has trained."""

    def take(self, index: int) -> Rolled:
        """Return the rollout of a step."""

    def run(self, job: Callable[[], _Result]) -> _Result:
        """Return what a job gives that uses the generator or the task."""

    def close(self) -> None:
        """Let go of the generator."""


def rollouts_of(config: TrainConfig, parts: Parts, record: Follower) -> Rollouts:
    """Return the rollouts of the steps that remain of a run, drawn as its options say."""
    if parts.is_supervised:
        return Answers(config, parts)
    return Ahead(config, parts, record) if config.max_staleness else InTurn(config, parts)


class InTurn:
    """Draws each rollout when its step begins, with the policy that the step trains."""

    older: Sequence[Params] = ()

    def __init__(self, config: TrainConfig, parts: Parts) -> None:
        self._config, self._parts = config, parts
        self._policies: list[Policy] = []  # the newest alone

    @property
    def newest(self) -> Policy:
        """The policy that was given last."""
        return self._policies[-1]

    def give(self, version: int, trained: Params) -> None:
        """Push what a step has trained."""
        parts = self._parts
        # Where the ranks share what is trained, the generator alone has it whole.
        is_shared = not isinstance(parts.layout, tuple)
        policy = Policy(version, trained, () if is_shared else parts.policy(trained), is_shared)
        parts.generator.push(whole_policy(parts, policy), version)
        self._policies = [policy]

    def take(self, index: int) -> Rolled:
        """Draw the rollout of a step."""
        return roll(self._config, self._parts, index, self.newest)

    def run(self, job: Callable[[], _Result]) -> _Result:
        """Run the job."""
        return job()

    def close(self) -> None:
        """Do nothing: nothing is under way between two calls."""


class Answers(InTurn):
    """Takes the task's own answers, which supervised training is on: nothing is drawn."""

    def give(self, version: int, trained: Params) -> None:
        """Take what a step has trained, for an evaluation."""
        self._policies = [Policy(version, trained, (), not isinstance(self._parts.layout, tuple))]

    def take(self, index: int) -> Rolled:
        """Return the answers of a step's prompts."""
        config, task = self._config, self._parts.task
        rollout = answers_of(task, prompts_of(config, task, index), config.device)
        return Rolled(None, None, rollout, {}, self.newest)


class Ahead:
    """Draws rollouts in a thread of its own while earlier steps train.

    Rollout k is drawn with the policy of version `k - 1 - max_staleness`, or the oldest there is:
    a function of k, and not of how fast anything is. So a run repeats, and one that goes on from a
    checkpoint with the `older` policies draws what was under way once more.

    The generator and the task are used in that thread alone, one job after the other; on a GPU on
    a stream of its own. An error in it is raised by the `take` of its step.
    """

    def __init__(self, config: TrainConfig, parts: Parts, record: Follower) -> None:
        self._config, self._parts = config, parts
        self._note = record.note
        done, older = record.progress.step, record.progress.older
        self._thread = ThreadPoolExecutor(
            1, thread_name_prefix="rollouts", initializer=_device_setter(config.device)
        )
        self._stream = _Stream(config.device)
        self._policies = deque[Policy]()  # oldest first, up to the newest
        self._coming = deque[Future[Rolled]]()  # the rollouts that no step has taken yet
        self._jobs: set[Future[Any]] = set()  # those that have not ended
        self._next = done + 1  # the first rollout that the thread has not been asked for
        self._compiles = parts.donates
        for version, trained in enumerate(older, start=done - len(older)):
            self._policies.append(Policy(version, trained, parts.policy(trained)))

    @property
    def older(self) -> Sequence[Params]:
        """What was trained after earlier steps and draws rollouts to come, oldest first."""
        return [policy.trained for policy in self._policies][:-1]

    @property
    def newest(self) -> Policy:
        """The policy that was given last."""
        return self._policies[-1]

    def give(self, version: int, trained: Params) -> None:
        """Keep what a step has trained, in memory that no later step writes to."""
        whole = whole_params(self._parts, trained)
        kept = tree.map(torch.clone, whole) if self._parts.donates else whole
        self._policies.append(Policy(version, kept, self._parts.policy(kept)))
        while self._policies[0].version < version - self._config.max_staleness:
            self._policies.popleft()

    def take(self, index: int) -> Rolled:
        """Return the rollout of a step, and ask for those that may be drawn while it trains."""
        start = time.perf_counter()
        if self._coming and self._coming[0].done():
            self._coming[0].result()  # an error is raised before more is drawn
        while self._next <= min(index + self._config.max_staleness, self._config.steps):
            self._coming.append(self._submit(self._roll, self._next, self._policy_of(self._next)))
            self._next += 1
        if self._compiles:  # the first shape is traced and recorded with nothing beside it
            wait(self._coming)
            self._compiles = False
        rolled = self._coming.popleft().result()
        samples = () if rolled.completed is None else rolled.completed.samples
        self._stream.hand_over((samples, rolled.rollout))
        staleness = index - 1 - rolled.policy.version
        more = {"staleness": staleness, "time/wait": time.perf_counter() - start}
        return rolled._replace(numbers=rolled.numbers | more)

    def run(self, job: Callable[[], _Result]) -> _Result:
        """Run the job in the thread, after the rollouts that it has been asked for."""
        return self._submit(job).result()

    def close(self) -> None:
        """Wait for the rollout that is being drawn, and end the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        running = list(self._jobs)
        if wait(running, timeout=_PATIENCE).not_done:
            self._note(
                "Waiting for the rollout that is being drawn, whose completions or rewards take "
                "long. One more Ctrl-C (or SIGTERM) ends the run without it."
            )
            wait(running)
        self._thread.shutdown(wait=True)

    def _policy_of(self, index: int) -> Policy:
        wanted = index - 1 - self._config.max_staleness
        return next(policy for policy in self._policies if policy.version >= wanted)

    def _roll(self, index: int, policy: Policy) -> Rolled:
        start = time.perf_counter()
        self._parts.generator.push(whole_policy(self._parts, policy), policy.version)
        pushed = time.perf_counter() - start
        rolled = roll(self._config, self._parts, index, policy)
        generate = pushed + rolled.numbers["time/generate"]
        return rolled._replace(numbers=rolled.numbers | {"time/generate": generate})

    def _submit(self, job: Callable[..., _Result], *args: Any) -> "Future[_Result]":
        context = contextvars.copy_context()  # of the caller's settings, as in its own thread
        made = self._thread.submit(context.run, self._alone, self._stream.mark(), job, *args)
        self._jobs.add(made)
        made.add_done_callback(self._jobs.discard)  # or what it drew with would stay in memory
        return made

    def _alone(self, mark: Any, job: Callable[..., _Result], *args: Any) -> _Result:
        with self._stream.after(mark):
            return job(*args)


def _device_setter(device: str) -> Callable[[], None]:
    """Return what gives a thread this one's GPU: of several ranks each has its own."""
    if device != "cuda":
        return lambda: None
    return partial(torch.cuda.set_device, torch.cuda.current_device())


class _Stream:
    """A stream of the GPU for the work of a thread; on a CPU there is none, and none is needed."""

    def __init__(self, device: str) -> None:
        self._stream = torch.cuda.Stream() if device == "cuda" else None

    def mark(self) -> Any:
        """Return the place that the caller's stream has reached."""
        if self._stream is None:
            return None
        return torch.cuda.current_stream(self._stream.device).record_event()

    @contextmanager
    def after(self, mark: Any) -> Iterator[None]:
        """Work on the stream, behind what was marked, and wait until all of it is done."""
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.synchronize()

    def hand_over(self, values: Any) -> None:
        """Keep the memory of tensors until the caller's stream has read them, too."""
        if self._stream is None:
            return
        reader = torch.cuda.current_stream(self._stream.device)
        for leaf in tree.leaves(values):
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(reader)
