"""MATH: problems of competitions (arXiv:2103.03874), whose answers math-verify compares."""

import contextlib
import json
import re
import resource
import select
import subprocess
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path

from funcrl.tasks.answers import boxed_answer, number_of
from funcrl.tasks.builtin.generated import RecordedTask
from funcrl.tasks.contracts import Prompt, Tokenizer
from funcrl.tasks.read_rows import read_records

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


_INSTRUCTION = "\nThink step by step. Put the final answer, and nothing else, in \\boxed{}."

_NOT_WORKED_OUT = re.compile(
    r"\\(?:neq?|approx|Rightarrow|rightarrow|to|implies|int|sum|prod|binom|times|cdot)(?![a-z])"
    r"|[*<>]|=.*=|\d\s*="
)


class Math(RecordedTask):
    r"""Problems to answer with reasoning and `\boxed{ANSWER}`.

    Rewards are `correct` (the last boxed answer means the same as the gold one, as math-verify
    sees it) and `format` (there is one), a tenth as much.

    Args:
        train: a .jsonl or .parquet file with the columns problem and solution, or answer.
        test: another one, of held-out problems.
        tokenizer: the model's.
    """

    name = "math"
    reward_weights: Mapping[str, float] = {"correct": 1.0, "format": 0.1}

    def __init__(self, train: Path, test: Path, tokenizer: Tokenizer) -> None:
        super().__init__(_read(train), _read(test), tokenizer)
        self._judge = Judge()

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return whether the boxed answer is right, and whether there is one."""
        answer = boxed_answer(completion)
        # Where the answer is a number, an expression that is equal to it does not count.
        hidden = number_of(prompt.answer) is not None and _NOT_WORKED_OUT.search(answer)
        same = not hidden and self._judge.same(answer, prompt.answer)
        return {"correct": float(same), "format": float(bool(answer))}

    def extract(self, completion: str) -> str:
        """Return the answer that a completion votes for."""
        return boxed_answer(completion)


def _read(path: Path) -> list[Prompt]:
    prompts = []
    for number, row in enumerate(read_records("math", path), start=1):
        # Two solutions of MATH leave the braces out: `\boxed 2$.`
        solution = re.sub(r"\\boxed (\w)", r"\\boxed{\1}", str(row.get("solution", "")))
        gold = str(row.get("answer") or boxed_answer(solution))
        if "problem" in row and not gold and "\\boxed{}" in solution:
            continue  # two problems of MATH have no answer
        if "problem" not in row or not gold:
            raise ValueError(
                f"math expects a problem with an answer, or a solution with a \\boxed one, got "
                f"neither in row {number} of {path}."
            )
        prompts.append(
            Prompt(str(row["problem"]) + _INSTRUCTION, gold, solution or f"\\boxed{{{gold}}}")
        )
    return prompts
