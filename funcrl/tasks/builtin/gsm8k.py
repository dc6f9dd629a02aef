"""GSM8K: word problems of grade school (arXiv:2110.14168)."""

import re
from collections.abc import Mapping
from pathlib import Path

from funcrl.tasks.answers import boxed_answer, marked_answer, number_of, same_number
from funcrl.tasks.builtin.generated import RecordedTask
from funcrl.tasks.contracts import Prompt, Tokenizer
from funcrl.tasks.read_rows import read_records

_INSTRUCTION = "\nThink step by step. End with '#### ' and the answer, a number and nothing else."


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
        super().__init__(_read(folder, "train"), _read(folder, "test"), tokenizer)

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


def _read(folder: Path, split: str) -> list[Prompt]:
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
        prompts.append(Prompt(str(row["question"]) + _INSTRUCTION, gold, demonstration))
    return prompts
