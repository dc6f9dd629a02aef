"""Children of a process that has imported everything, so that none pays for a start-up."""

import os
import traceback
from collections.abc import Callable


def child_of(work: Callable[[], object]) -> int:
    """Do some work in a child and return its id: orbax does not bear a fork after it was used."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return child
