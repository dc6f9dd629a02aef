"""MATH: problems of competitions (arXiv:2103.03874), evaluated on MATH-500 (arXiv:2305.20050)."""

import re
from collections.abc import Mapping
from pathlib import Path

from funcrl.tasks.answers import boxed_answer, number_of
from funcrl.tasks.builtin.generated import RecordedTask
from funcrl.tasks.builtin.judge import Judge
from funcrl.tasks.contracts import Prompt, Tokenizer
from funcrl.tasks.read_rows import read_records

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
