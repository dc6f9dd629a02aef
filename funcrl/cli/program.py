"""The program `funcrl`: runs the command that its arguments name, and exits as programs do."""

import os
import select
import signal
import sys
import traceback
from collections.abc import Sequence

from funcrl.cli.command_line import UsageError
from funcrl.cli.commands import run_command
from funcrl.core.process import ExplainedMemoryError, is_out_of_memory
from funcrl.core.text import print_safely, safe_warnings
from funcrl.generators import EngineError
from funcrl.loop.rollouts.grade import RewardError
from funcrl.run.checkpoint import CheckpointError
from funcrl.tasks.reward_calls import describe_error, is_of_user

# Errors that a user can mend; any other is a bug, and is shown with its traceback.
_EXPECTED = (
    ValueError, OSError, ImportError, CheckpointError, EngineError, ExplainedMemoryError,
    RewardError,
)  # fmt: skip

# What is said where memory ran out, by the command.
_LESS_MEMORY = {
    "train": "Memory ran out: --microbatch, --logprob-chunk and --slots lower what a run needs, "
    "--dry-run prints the parts, and docs/recipes.md has more options in order.",
    "eval": "Memory ran out: --slots lowers what an evaluation needs.",
}
_TRACEBACK = "FUNCRL_TRACEBACK=1 in the environment shows the traceback."


def main(args: Sequence[str] | None = None) -> None:
    """Run the command that the arguments name.

    Exit with 0, 1 (failed), 2 (usage), 130 or 143 (a signal), or 141 (nobody reads the output).
    """
    args = sys.argv[1:] if args is None else list(args)
    # vLLM logs a great deal to the screen on which the run is shown.
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    try:
        try:
            _run(args)
        finally:
            if sys.stdout is not None:  # as it is where a program is started with it closed
                sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more as it exits, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(128 + signal.SIGPIPE)


def _run(args: Sequence[str]) -> None:
    """Run a command, and print the error that ends it."""
    try:
        with safe_warnings(sys.stderr):
            run_command(args)
    except KeyboardInterrupt:
        sys.exit(130)
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads_output():
            raise
        expected = isinstance(error, _EXPECTED)
        ran_out = not expected and is_out_of_memory(error)
        explained = (expected or ran_out) and "FUNCRL_TRACEBACK" not in os.environ
        # Notes say what happened on the error's way, such as what is saved.
        message, notes = str(error), list(getattr(error, "__notes__", []))
        if ran_out:
            message = message or type(error).__name__  # Python's own error says nothing
            notes.insert(0, f"{_LESS_MEMORY.get(args[0], 'Memory ran out.')} {_TRACEBACK}")
        elif expected and is_of_user(error):  # the message alone does not say where
            message = describe_error("Your code", error)
        lines = [f"funcrl: {message}", *notes]
        print_safely("\n".join(lines) if explained else traceback.format_exc(), sys.stderr)
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _nobody_reads_output() -> bool:
    """Return whether standard output is a pipe whose reader has gone, such as `head`."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError):  # None where it is closed; a notebook's is no file
        return False
    poll = select.poll()
    poll.register(output, 0)  # an error is reported in any case
    return bool(poll.poll(0))
