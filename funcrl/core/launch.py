"""How this process was launched: one of several ranks, or a forked child."""

import os


class ForkedError(BaseException):
    """A child process that a task forked and that went on with the run of its parent.

    It is no `Exception`, so that nothing that skips the errors of a reward can keep the child.
    """


def refuse_ranks(function: str) -> None:
    """Raise in one of several processes that torchrun or accelerate has started.

    Each would do the same work, none of it shared.

    Args:
        function: for the error.
    """
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size.isdigit() and int(world_size) > 1:
        raise ValueError(
            f"{function} expects one process, got one of {world_size} (WORLD_SIZE), as torchrun "
            f"and accelerate start them: each would train the same run by itself. "
            f"docs/scaling.md says what funcrl does with several GPUs."
        )
