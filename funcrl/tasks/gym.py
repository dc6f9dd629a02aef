"""Every generator of reasoning-gym as a task: procedural problems with their own verifiers."""

from collections.abc import Mapping, Sequence
from typing import Any

from funcrl import checks, rng
from funcrl.protocols import Prompt, Tokenizer
from funcrl.tasks.answers import tagged_answer

_ASK = "\nEnd with your final answer as <answer>...</answer>."
_MOST_HELD_OUT = 500
_TRIES = 1000


class ReasoningGym:
    """The problems of one generator of reasoning-gym, answered in `<answer>...</answer>`.

    Rewards are `correct` (the generator's own score of the answer, 0 to 1) and `format` (there is
    an answer), a tenth as much. A problem that is held out is never trained on.

    Args:
        generator: its name in reasoning-gym.
        tokenizer: the model's.
    """

    accuracy = "correct"
    reward_weights: Mapping[str, float] = {"correct": 1.0, "format": 0.1}

    def __init__(self, generator: str, tokenizer: Tokenizer) -> None:
        why = f"for {generator!r}"
        gym = checks.import_extra("reasoning_gym", "reasoning_gym.factory", why, "reasoning-gym")
        known = gym.DATASETS
        if generator not in known:
            raise ValueError(
                f"reasoning_gym expects one of its {len(known)} generators, got {generator!r}; "
                f"among them {', '.join(sorted(known)[:5])}."
            )
        self.name = f"reasoning_gym:{generator}"
        self.tokenizer = tokenizer
        self._make = gym.create_dataset
        self._generator = generator
        self._scorer: Any = self._make(generator, seed=0, size=1)
        self._held_out = {entry["question"]: entry for entry in self._entries(1, _MOST_HELD_OUT)}

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return problems that are not held out."""
        return [self._draw(seed, index) for index in range(start, start + count)]

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return the generator's score of the answer, and whether there is one."""
        answer = tagged_answer(completion)
        score = self._scorer.score_answer(answer, prompt.data) if answer else 0.0
        return {"correct": float(score), "format": float(bool(answer))}

    def extract(self, completion: str) -> str:
        """Return the answer that a completion votes for."""
        return tagged_answer(completion)

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out problems."""
        return [_ask(entry) for entry in list(self._held_out.values())[:count]]

    def _entries(self, seed: int, size: int) -> list[dict[str, Any]]:
        return list(self._make(self._generator, seed=rng.fold_in(seed) % 2**31, size=size))

    def _draw(self, seed: int, index: int) -> Prompt:
        for attempt in range(_TRIES):
            entry = self._entries(rng.fold_in(seed, index, attempt), 1)[0]
            if entry["question"] not in self._held_out:
                return _ask(entry)
        raise ValueError(
            f"{self.name} expects problems besides the {len(self._held_out)} that are held out, "
            f"got none in {_TRIES} tries."
        )


def _ask(entry: dict[str, Any]) -> Prompt:
    return Prompt(entry["question"] + _ASK, str(entry["answer"]), entry)
