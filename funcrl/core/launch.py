"""How this process was launched: one of several ranks, or a forked child."""

import os


def end_forked_child(process: int) -> None:
    """End this process if it is a forked child of the given one, which goes on by itself.

    A child that returns from a user's function would go on with the run of its parent, without
    torch's threads. It ends at once: what is done at exit, and not yet printed, is the parent's.
    """
    if os.getpid() == process:
        return
    message = (
        f"funcrl: process {process} forked a child in a reward, and the child returned from there; "
        f"a child must end by os._exit. The run goes on in its own process, and not in this child "
        f"{os.getpid()}.\n"
    )
    os.write(2, message.encode())  # standard error
    os._exit(1)


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
