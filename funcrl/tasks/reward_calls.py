"""Makes the calls of rewards, side by side where they are async, and says what went wrong where."""

import asyncio
import contextvars
import inspect
import os
import sysconfig
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from funcrl.core.arguments import CheckedFields, Count, FinitePositive
from funcrl.core.process import end_forked_child

_FUNCRL = str(Path(__file__).parents[1]) + os.sep
_STANDARD = tuple({sysconfig.get_path(each) + os.sep for each in ("stdlib", "platstdlib")})
_PACKAGES = ("site-packages", "dist-packages")
_LONGEST_MESSAGE = 500  # characters


class FunctionError(ValueError):
    """A reward function failed; the message names it, and where it was."""


def function_error(name: str, error: BaseException) -> FunctionError:
    """Return an error that says which reward function failed; `error` is its cause."""
    made = FunctionError(describe_error(f"The reward {name!r}", error))
    made.__cause__ = error
    return made


def describe_error(what: str, error: BaseException) -> str:
    """Return what happened to a reward: the error, and the file and line that it was raised in.

    Args:
        what: the reward, or other code of the user's, as the subject of a sentence.
        error: that was raised.
    """
    if isinstance(error, FunctionError):
        return str(error)
    if isinstance(error, NoRewardError):
        return f"{what} {error}"
    place = _place(error)
    message = shorten(str(error), _LONGEST_MESSAGE)
    return f"{what} raised {type(error).__name__}: {message}{place and f' ({place})'}"


def is_of_user(error: BaseException) -> bool:
    """Return whether the user's code raised an error, itself or in a call of a library."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if frame.filename.startswith(_FUNCRL):
            return False
        if not _is_library(frame.filename):
            return True
    return False


def shorten(text: str, most: int) -> str:
    """Return a text, cut in the middle where it has more than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _place(error: BaseException) -> str:
    """Return the file and line of the user's code that raised an error, "" if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    if error.__cause__ is not None:
        frames = traceback.StackSummary(
            [*frames, *traceback.extract_tb(error.__cause__.__traceback__)]
        )
    files = [frame.filename for frame in frames]
    own = [n for n, file in enumerate(files) if not _is_library(file)]
    if not own:
        own = [n for n, file in enumerate(files) if any(part in file for part in _PACKAGES)]
    return f"{files[own[-1]]}, line {frames[own[-1]].lineno}" if own else ""


def _is_library(file: str) -> bool:
    """Return whether a file is funcrl's, Python's or an installed package's."""
    if file.startswith((_FUNCRL, "<frozen ")) or any(part in file for part in _PACKAGES):
        return True
    return file.startswith(_STANDARD)


# What no reward raises for its own completion.
NOT_CAUGHT = (KeyboardInterrupt, GeneratorExit)
_GRACE = 1.0  # seconds that a cancelled call has to end; one that does not is left behind


@dataclass(frozen=True)
class RewardLimits(CheckedFields):
    """How rewards that are `async def` run."""

    concurrency: Count = 32
    """How many run at a time."""
    timeout: FinitePositive = 30.0
    """The seconds that each may take, from when it begins."""


class NoRewardError(Exception):
    """A call gave no reward, for a reason that goes on after `The reward`; nothing was raised."""


def run_calls(calls: Sequence[Callable[[], Any]], limits: RewardLimits) -> list[Any]:
    """Return what each call returns, or the exception that it raised, in the order of the calls.

    What a call returns is awaited if it can be. Calls are made one after the other; only what they
    return runs side by side, in one event loop.
    """
    results: list[Any] = []
    try:
        results += [_caught(call) for call in calls]
        places = [place for place, each in enumerate(results) if inspect.isawaitable(each)]
        if places:
            for place, value in zip(
                places, _await_all([results[each] for each in places], limits), strict=True
            ):
                results[place] = value
        return results
    finally:
        for each in results:  # after an interrupt: Python warns of a coroutine that never began
            if inspect.iscoroutine(each) and inspect.getcoroutinestate(each) == "CORO_CREATED":
                each.close()


def _caught(call: Callable[[], Any]) -> Any:
    process = os.getpid()
    try:
        return call()
    except NOT_CAUGHT:
        raise
    except BaseException as error:  # sys.exit, for one, would end the run
        return error
    finally:
        end_forked_child(process)


def _await_all(awaitables: Sequence[Awaitable[Any]], limits: RewardLimits) -> list[Any]:
    """Return the results of awaitables, each of which may be an exception."""
    loop = asyncio.new_event_loop()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _run(loop, awaitables, limits)
    # A loop runs in this thread already, as in Jupyter: another thread can have one of its own.
    context = contextvars.copy_context()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(context.run, _run, loop, awaitables, limits)
        try:
            return future.result()
        except BaseException:  # an interrupt must not wait for all of the calls
            if not future.done():
                loop.call_soon_threadsafe(loop.stop)
            raise


def _run(
    loop: asyncio.AbstractEventLoop, awaitables: Sequence[Awaitable[Any]], limits: RewardLimits
) -> list[Any]:
    """Run a new loop until all are done, and close it."""
    try:
        return loop.run_until_complete(_gather(awaitables, limits))
    finally:
        left = asyncio.all_tasks(loop)
        for each in left:
            each.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left, timeout=_GRACE))
        loop.run_until_complete(loop.shutdown_asyncgens())
        # Unlike `asyncio.run`, this does not wait for threads that late calls have left behind.
        loop.close()


async def _gather(awaitables: Sequence[Awaitable[Any]], limits: RewardLimits) -> list[Any]:
    slots = asyncio.Semaphore(limits.concurrency)
    return await asyncio.gather(*(_limited(each, slots, limits.timeout) for each in awaitables))


async def _limited(awaitable: Awaitable[Any], slots: asyncio.Semaphore, seconds: float) -> Any:
    async with slots:
        task = asyncio.ensure_future(_awaited(awaitable))
        await asyncio.wait({task}, timeout=seconds)
        if task.done():
            return task.result()
        task.cancel()
        return NoRewardError(f"took longer than {seconds:g} s (--reward-timeout)")


async def _awaited(awaitable: Awaitable[Any]) -> Any:
    process = os.getpid()
    try:
        return await awaitable
    except NOT_CAUGHT:
        raise
    # Cancelled by the function itself; a task that ends by SystemExit would end the loop.
    except BaseException as error:
        return error
    finally:
        end_forked_child(process)
