"""GSM8K: word problems of grade school (arXiv:2110.14168)."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from funcrl import checks, rng
from funcrl.protocols import Prompt, Tokenizer
from funcrl.tasks.answers import marked_answer, number_of, same_number

_ASK = "\nThink step by step. End with '#### ' and the answer, a number and nothing else."


class Gsm8k:
    """A problem is to be answered by its reasoning and `#### NUMBER`.

    Rewards are `correct` (the number equals the gold one) and `format` (there is a mark with
    something after it, once), a tenth as much.

    Args:
        folder: with train and test, as .jsonl or .parquet, with the columns question and answer.
        tokenizer: the model's.
    """

    name = "gsm8k"
    accuracy = "correct"
    reward_weights: Mapping[str, float] = {"correct": 1.0, "format": 0.1}

    def __init__(self, folder: Path, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._train, self._test = (_read(folder, split) for split in ("train", "test"))
        both = {prompt.text for prompt in self._train} & {prompt.text for prompt in self._test}
        if both:
            raise ValueError(
                f"gsm8k expects no problem in both train and test of {folder}, got "
                f"{min(both).removesuffix(_ASK)[:80]!r}."
            )

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return problems of the training split: every epoch is a permutation of them."""
        epochs: dict[int, list[int]] = {}
        chosen = []
        for index in range(start, start + count):
            epoch, place = divmod(index, len(self._train))
            if epoch not in epochs:
                epochs[epoch] = sorted(
                    range(len(self._train)), key=lambda row: rng.fold_in(seed, epoch, row)
                )
            chosen.append(self._train[epochs[epoch][place]])
        return chosen

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return whether the marked number is right, and whether there is one."""
        answer = marked_answer(completion)
        return {
            "correct": float(same_number(answer, prompt.answer)),
            "format": float(bool(answer) and completion.count("####") == 1),
        }

    def extract(self, completion: str) -> str:
        """Return the answer that a completion votes for; however it is written, a number is one."""
        answer = marked_answer(completion)
        number = number_of(answer)
        return answer if number is None else f"{number.normalize():f}"

    def demonstrate(self, prompt: Prompt) -> str:
        """Return the solution that the data have."""
        return str(prompt.data)

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return problems of the test split, spread over it."""
        order = sorted(range(len(self._test)), key=lambda row: rng.fold_in(1, row))
        return [self._test[row] for row in order[:count]]


def _read(folder: Path, split: str) -> list[Prompt]:
    """Return the problems of a split; the gold answer stands after the mark of its solution."""
    rows = None
    for path in (folder / f"{split}.jsonl", folder / f"{split}.parquet"):
        if path.exists():
            rows = _jsonl(path) if path.suffix == ".jsonl" else _parquet(path)
            break
    if not rows:
        raise FileNotFoundError(
            f"gsm8k expects problems in {folder}/{split}.jsonl or .parquet, got none."
        )
    prompts = []
    for number, row in enumerate(rows, start=1):
        is_row = isinstance(row, dict) and "question" in row
        solution = str(row.get("answer", "")) if is_row else ""
        gold = marked_answer(solution)
        if number_of(gold) is None:
            raise ValueError(
                f"gsm8k expects a question and an answer that ends in '#### NUMBER', got neither "
                f"in row {number} of {split} in {folder}."
            )
        # <<2*3=6>> are the notes of the data's makers for a calculator.
        shown = re.sub(r"<<[^<>]*>>", "", solution)
        prompts.append(Prompt(str(row["question"]) + _ASK, gold, shown))
    return prompts


def _jsonl(path: Path) -> list[Any]:
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        try:
            rows += [json.loads(line)] if line.strip() else []
        except ValueError as error:
            raise ValueError(
                f"gsm8k expects one JSON object a line, got {line[:60]!r} in line {number} of "
                f"{path}."
            ) from error
    return rows


def _parquet(path: Path) -> list[Any]:
    parquet = checks.import_extra("gsm8k", "pyarrow.parquet", f"for {path}", "pyarrow")
    rows: list[Any] = parquet.read_table(path).to_pylist()
    return rows
