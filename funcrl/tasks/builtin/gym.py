"""Every generator of reasoning-gym as a task: procedural problems with their own verifiers."""

import re
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from funcrl.core import checks, rng
from funcrl.tasks.answers import tagged_answer
from funcrl.tasks.builtin.generated import GeneratedTask
from funcrl.tasks.contracts import Prompt, Tokenizer

_INSTRUCTION = "\nEnd with your final answer as <answer>...</answer>."
_MOST_HELD_OUT = 500

# Generators that no policy can be trained on.
_REFUSED = {
    "composite": "it is a mixture of others, which must be named",
    "game_of_life_halting": "its verifier takes any text for a yes",
    "puzzle24": "its verifier takes any four numbers that make 24",
    "simple_integration": "its verifier runs a policy's text as Python, and may never end",
    "intermediate_integration": "its verifier runs a policy's text as Python, and may never end",
}
# Their problems depend on the order of a set.
_DEPENDS_ON_HASHES = (
    "isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication",
    "ransom_note", "word_ladder",
)  # fmt: skip
# What an answer may consist of, for verifiers that run it as Python or that read nan as a number:
# neither calls nor powers of powers. A time limit would make rewards depend on the machine.
_LIST = r"[\w\s\[\],'\".]*"
_ALLOWED = {
    "binary_matrix": _LIST,
    "complex_arithmetic": r"[\d\s.+\-ij()]*",
    "countdown": r"(?:[\d\s+\-/()]|\*(?!\s*\*)){,200}",
    "n_queens": _LIST,
    "polynomial_multiplication": r"(?:[a-zA-Z]\*\*\d{1,2}(?!\d)(?!\s*\*\s*\*)"
    r"|\b[a-zA-Z]\b(?!\s*\()|[\d\s+\-()]|\*(?!\s*\*))*",
    "spiral_matrix": _LIST,
    "string_insertion": _LIST,
}


class ReasoningGym(GeneratedTask):
    """The problems of one generator of reasoning-gym, answered in `<answer>...</answer>`.

    Rewards are `correct` (the generator's own score of the answer, 0 to 1) and `format` (there is
    an answer), a tenth as much. An answer that the verifier cannot read scores 0. A problem that is
    held out is never trained on.

    A few generators are refused: those whose verifiers reward anything or run a policy's text as
    Python, and those whose problems differ between processes, unless PYTHONHASHSEED is 0.

    Args:
        generator: its name in reasoning-gym.
        tokenizer: the model's.
    """

    reward_weights: Mapping[str, float] = {"correct": 1.0, "format": 0.1}

    def __init__(self, generator: str, tokenizer: Tokenizer) -> None:
        why = f"for {generator!r}"
        gym = checks.import_extra("reasoning_gym", "reasoning_gym.factory", why, "reasoning-gym")
        generators = gym.DATASETS
        if generator not in generators:
            raise ValueError(
                f"reasoning_gym expects one of its {len(generators)} generators, got "
                f"{generator!r}; among them {', '.join(sorted(generators)[:5])}."
            )
        if generator in _REFUSED:
            raise ValueError(
                f"reasoning_gym expects a generator to train on, got {generator!r}: "
                f"{_REFUSED[generator]}."
            )
        if generator in _DEPENDS_ON_HASHES and sys.flags.hash_randomization:
            raise ValueError(
                f"reasoning_gym expects PYTHONHASHSEED=0 in the environment for {generator!r}, "
                f"whose problems depend on it, got none."
            )
        self.name = f"reasoning_gym:{generator}"
        self.tokenizer = tokenizer
        self._make = gym.create_dataset
        self._generator = generator
        self._scorer: Any = self._make(generator, seed=0, size=1)
        self._held_out = {entry["question"]: entry for entry in self._entries(1, _MOST_HELD_OUT)}

    def draw(self, *seed: int) -> tuple[Prompt, str]:
        """Return a problem and its question."""
        entry = self._entries(rng.fold_in(*seed), 1)[0]
        return _prompt(entry), entry["question"]

    def holds_out(self, key: str) -> bool:
        """Return whether a question is among those for evaluation."""
        return key in self._held_out

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return the generator's score of the answer, and whether there is one."""
        answer = tagged_answer(completion)
        return {"correct": self._score(answer, prompt), "format": float(bool(answer))}

    def extract(self, completion: str) -> str:
        """Return the answer that a completion votes for."""
        return tagged_answer(completion)

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out problems."""
        return [_prompt(entry) for entry in list(self._held_out.values())[:count]]

    def demonstrate(self, prompt: Prompt) -> str:
        """Return the generator's answer, tagged."""
        return f"<answer>{prompt.answer}</answer>"

    def _score(self, answer: str, prompt: Prompt) -> float:
        if not answer or not re.fullmatch(_ALLOWED.get(self._generator, r"(?s).*"), answer):
            return 0.0
        try:
            score = float(self._scorer.score_answer(answer, prompt.data))
        except Exception:  # each verifier raises in its own way for an answer that it cannot read
            return 0.0
        return score if score <= 1.0 else 0.0  # nan too

    def _entries(self, seed: int, size: int) -> list[dict[str, Any]]:
        return list(self._make(self._generator, seed=rng.fold_in(seed) % 2**31, size=size))


def _prompt(entry: dict[str, Any]) -> Prompt:
    return Prompt(entry["question"] + _INSTRUCTION, str(entry["answer"]), entry)
