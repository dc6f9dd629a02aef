"""Bounds of time and memory around a piece of code, for files that want more of both."""

import resource
import signal
from contextlib import contextmanager
from pathlib import Path


def virtual_bytes():
    """The address space of this process, which is what `RLIMIT_AS` counts."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _late(number, frame):
    raise AssertionError("this took too long")


@contextmanager
def bounded(seconds=10.0, more_bytes=1 << 30):
    """Run the body in so many seconds, and in so many bytes more than the process has.

    The seconds are of the processor, since a machine of CI has other things to do; what waits, for
    a pipe say, has ten times as many of the clock.
    """
    before = resource.getrlimit(resource.RLIMIT_AS)
    timers = {signal.SIGPROF: (signal.ITIMER_PROF, seconds),
              signal.SIGALRM: (signal.ITIMER_REAL, 10 * seconds)}  # fmt: skip
    handlers = {number: signal.signal(number, _late) for number in timers}
    resource.setrlimit(resource.RLIMIT_AS, (virtual_bytes() + more_bytes, before[1]))
    for timer, limit in timers.values():
        signal.setitimer(timer, limit)
    try:
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
