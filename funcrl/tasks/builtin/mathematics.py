"""GSM8K's word problems (arXiv:2110.14168), and MATH (arXiv:2103.03874) with MATH-500."""

import re
from collections.abc import Mapping
from pathlib import Path

from funcrl.tasks.answers import boxed_answer, marked_answer, number_of, same_number
from funcrl.tasks.builtin.generated import RecordedTask
from funcrl.tasks.builtin.judge import Judge
from funcrl.tasks.contracts import Prompt, Tokenizer
from funcrl.tasks.read_rows import read_records

_GSM8K_INSTRUCTION = (
    "\nThink step by step. End with '#### ' and the answer, a number and nothing else."
)


class Gsm8k(RecordedTask):
    r"""Problems to answer with reasoning and `#### NUMBER`.

    Rewards are `correct` (the number equals the gold one) and `format` (there is a mark with
    something after it, once), a tenth as much. Where there is no mark, `correct` reads the last
    `\boxed{NUMBER}`, with which many pretrained models end.

    Args:
        folder: with train and test, as .jsonl or .parquet, with the columns question and answer.
        tokenizer: the model's.
    """

    name = "gsm8k"
    reward_weights: Mapping[str, float] = {"correct": 1.0, "format": 0.1}

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        super().__init__(_read_gsm8k(folder, "train"), _read_gsm8k(folder, "test"), tokenizer)

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return whether the marked number is right, and whether there is one."""
        return {
            "correct": float(same_number(_answer(completion), prompt.answer)),
            "format": float(bool(marked_answer(completion)) and completion.count("####") == 1),
        }

    def extract(self, completion: str) -> str:
        """Return the answer that a completion votes for, a number in one way of writing it."""
        answer = _answer(completion)
        number = number_of(answer)
        return answer if number is None else f"{number.normalize():f}"


def _answer(completion: str) -> str:
    return marked_answer(completion) or boxed_answer(completion)


def _read_gsm8k(folder: Path, split: str) -> list[Prompt]:
    """Return the problems of a split; the gold answer stands after the mark of its solution."""
    files = [folder / f"{split}.jsonl", folder / f"{split}.parquet"]
    rows = next((read_records("gsm8k", path) for path in files if path.exists()), None)
    if not rows:
        raise FileNotFoundError(
            f"gsm8k expects problems in {folder}/{split}.jsonl or .parquet, got none."
        )
    prompts = []
    for number, row in enumerate(rows, start=1):
        solution = str(row.get("answer", ""))
        gold = marked_answer(solution)
        if "question" not in row or number_of(gold) is None:
            raise ValueError(
                f"gsm8k expects a question and an answer that ends in '#### NUMBER', got neither "
                f"in row {number} of {split} in {folder}."
            )
        # The data has notes for a calculator, such as <<2*3=6>>.
        demonstration = re.sub(r"<<[^<>]*>>", "", solution)
        prompts.append(Prompt(str(row["question"]) + _GSM8K_INSTRUCTION, gold, demonstration))
    return prompts


_MATH_INSTRUCTION = "\nThink step by step. Put the final answer, and nothing else, in \\boxed{}."

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
        super().__init__(_read_math(train), _read_math(test), tokenizer)
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


def _read_math(path: Path) -> list[Prompt]:
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
            Prompt(str(row["problem"]) + _MATH_INSTRUCTION, gold, solution or f"\\boxed{{{gold}}}")
        )
    return prompts
