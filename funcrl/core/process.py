"""This process and those that it starts: its version, how it was launched, what ends it."""

import os
import subprocess
import sys
from pathlib import Path

import torch

VERSION = "0.1.0"


def commit() -> str | None:
    """Return the commit of funcrl's own files, "+changes" added where they differ from it.

    None where they are in no git checkout, or git cannot be asked.
    """
    package = Path(__file__).parents[1]
    if not (package.parent / ".git").exists():  # a checkout of others that funcrl lies in
        return None
    head = _git(package.parent, "rev-parse", "HEAD")
    changed = _git(package.parent, "status", "--porcelain", "--", package.name)
    if not head or changed is None:
        return None
    return head + ("+changes" if changed else "")


def _git(folder: Path, *command: str) -> str | None:
    """Return what git prints, None where it fails."""
    try:
        # No lock is taken, nothing of the user's configuration is run, and nobody is asked.
        done = subprocess.run(
            ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", *command],
            cwd=folder, capture_output=True, text=True, timeout=10, stdin=subprocess.DEVNULL,
            check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


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


def num_ranks() -> int:
    """Return how many processes torchrun or accelerate has started together; 1 without them."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isdigit() and int(size) > 0 else 1


def refuse_ranks(function: str, advice: str = "") -> None:
    """Raise in one of several processes that torchrun or accelerate has started.

    Each would do the same work, none of it shared.

    Args:
        function: or command, that several processes do not share.
        advice: what to do.
    """
    if num_ranks() > 1:
        raise ValueError(
            f"{function} expects one process, got one of {num_ranks()} (WORLD_SIZE), as torchrun "
            f"and accelerate start them: each would do the same work by itself.{advice}"
        )


def python_command(*arguments: str) -> list[str]:
    """Return the command that runs this Python, importing nothing from the working directory.

    That holds for the Python programs that it starts, too: the working directory may be a folder
    of somebody else's files.

    Args:
        arguments: of Python, such as "-m" and a module.

    Example:
        >>> import subprocess
        >>> from funcrl.core.process import python_command
        >>> subprocess.check_output(python_command("-c", "import sys; print(sys.path[0] == '')"))
        b'False\\n'
    """
    return ["env", "PYTHONSAFEPATH=1", sys.executable, *arguments]


# What torch says where an allocation fails with a RuntimeError like any other: the allocator of a
# CPU, and CUDA where it is not torch's own allocator that asks. The other errors have a type.
_NO_MEMORY = (
    "DefaultCPUAllocator: ", "CUDA error: out of memory", "CUDA driver error: out of memory",
)  # fmt: skip


class ExplainedMemoryError(MemoryError):
    """Memory ran out, and the message says what to do about it."""


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory ran out, of Python, NumPy or torch."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _NO_MEMORY)
