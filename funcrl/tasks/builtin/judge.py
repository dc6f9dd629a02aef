"""Compares mathematical answers with math-verify, in a process that can be stopped.

Run as a program, this file is that process. It reads `[gold, answer]` and writes true or false, one
JSON value a line, until its input ends.
"""

import contextlib
import json
import resource
import select
import subprocess
import sys
import weakref
from pathlib import Path

_LONGEST = 300  # characters of an answer; no gold answer of MATH has half as many
_START_SECONDS = 60.0
_MEMORY = 4 << 30


class Judge:
    """Compares LaTeX answers by their mathematical meaning, as math-verify reads it.

    An answer such as `9^{9^{9^9}}` would take for ever, and all the memory there is: the comparison
    is stopped then, and the answer counts as wrong.

    Args:
        seconds: for one comparison.

    Example:
        >>> from funcrl.tasks import Judge
        >>> judge = Judge()
        >>> judge.same("0.5", r"\\frac{1}{2}"), judge.same("0.6", r"\\frac{1}{2}")
        (True, False)
    """

    def __init__(self, seconds: float = 3.0) -> None:
        self._seconds = seconds
        self._child: subprocess.Popen[str] | None = None

    def same(self, answer: str, gold: str) -> bool:
        """Return whether an answer is right."""
        if answer == gold:
            return True
        if not answer or len(answer) > _LONGEST:
            return False
        for _ in range(2):  # once more, if the process has died
            if self._child is None:
                self._child = _start()
                self._stop = weakref.finalize(self, _stop, self._child)
            reply = _exchange(self._child, json.dumps([gold, answer]), self._seconds)
            if reply in ("true", "false"):
                return reply == "true"
            self._stop()
            self._child = None
            if reply is None:
                break
        return False


def _start() -> subprocess.Popen[str]:
    from funcrl.core.process import python_command  # the child does without funcrl

    # By its file, not as a module of funcrl, which would load torch.
    child = subprocess.Popen(
        python_command(str(Path(__file__))),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    if _exchange(child, json.dumps(["1", "1.0"]), _START_SECONDS) != "true":
        _stop(child)
        raise ImportError(
            "Judge expects math-verify with its LaTeX parser; "
            "pip install 'math-verify[antlr4_13_2]'."
        )
    return child


def _stop(child: "subprocess.Popen[str]") -> None:
    child.kill()
    child.wait()
    for pipe in (child.stdin, child.stdout):
        if pipe is not None:
            with contextlib.suppress(OSError):  # flushing text that was not sent
                pipe.close()


def _exchange(child: "subprocess.Popen[str]", line: str, seconds: float) -> str | None:
    """Send a line and return the reply: None if it is late, "" if the process has died."""
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        child.stdin.write(line + "\n")
        child.stdin.flush()
    except BrokenPipeError:
        return ""
    ready, _, _ = select.select([child.stdout], [], [], seconds)
    return child.stdout.readline().strip() if ready else None


def _serve() -> None:
    from math_verify import parse, verify

    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    for line in sys.stdin:
        # Without the time limits of math-verify, whose alarms may not interrupt it.
        gold, answer = (
            parse(f"\\boxed{{{text}}}", parsing_timeout=None) for text in json.loads(line)
        )
        same = bool(gold and answer and verify(gold, answer, timeout_seconds=None))
        print(json.dumps(same), flush=True)


if __name__ == "__main__":
    _serve()
