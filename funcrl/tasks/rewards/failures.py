"""Says what was wrong with a reward, and in which line of the user's code."""

import os
import sysconfig
import traceback
from pathlib import Path

from funcrl.tasks.rewards.calls import NoRewardError

_FUNCRL = str(Path(__file__).parents[2]) + os.sep
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
