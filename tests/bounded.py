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
    """Run the body in so many seconds, and in so many bytes more than the process has."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    handler = signal.signal(signal.SIGALRM, _late)
    resource.setrlimit(resource.RLIMIT_AS, (virtual_bytes() + more_bytes, before[1]))
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGALRM, handler)
