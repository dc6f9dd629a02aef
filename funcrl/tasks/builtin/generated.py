"""Problems made from a seed, a tenth of them held out, and the rows that describe them."""

from collections.abc import Hashable, Sequence
from typing import Any

from funcrl.core import rng
from funcrl.tasks.contracts import Prompt, Task, Tokenizer
from funcrl.tasks.rows import epochs, spread


class RecordedTask(Task):
    """Base class of tasks whose problems are read from files, each with its solution as `data`."""

    def __init__(
        self, train: Sequence[Prompt], test: Sequence[Prompt], tokenizer: Tokenizer
    ) -> None:
        check_apart(self.name, train, test)
        self._train, self._test, self.tokenizer = train, test, tokenizer

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return problems to train on: every epoch is a permutation of them."""
        return epochs(self._train, seed, start, count)

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out problems, spread over them."""
        return spread(self._test, count)

    def demonstrate(self, prompt: Prompt) -> str:
        """Return the solution that the data has."""
        return str(prompt.data)


def check_apart(task: str, train: Sequence[Prompt], test: Sequence[Prompt]) -> None:
    """Raise if a problem is in both splits."""
    both = {prompt.text for prompt in train} & {prompt.text for prompt in test}
    if both:
        raise ValueError(
            f"{task} expects no problem in both train and test, got {min(both)[:80]!r}."
        )


_HELD_OUT = 10
_TRIES = 1000
_EVALUATION_SEED = 1


def is_held_out(*key: int) -> bool:
    """Return whether a hash of its numbers puts a problem into the tenth that is held out."""
    return rng.fold_in(0, *key) % _HELD_OUT == 0


class GeneratedTask(Task):
    """Base class of tasks that make their problems: a subclass has `draw`, `name` and `reward`."""

    def draw(self, *seed: int) -> tuple[Prompt, Any] | None:
        """Return a random problem with its key, which says whether it is held out.

        Problems of one key are the same to a policy. None stands for a draw without a problem.
        """
        raise NotImplementedError

    def holds_out(self, key: Any) -> bool:
        """Return whether the problems of a key are kept for evaluation."""
        return is_held_out(*key)

    def prompts(self, seed: int, start: int, count: int) -> Sequence[Prompt]:
        """Return problems that are not held out."""
        return [self._first(False, seed, index)[0] for index in range(start, start + count)]

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out problems, no two alike."""
        found: dict[Hashable, Prompt] = {}
        for index in range(100 * count):
            prompt, key = self._first(True, _EVALUATION_SEED, index)
            found.setdefault(key, prompt)
            if len(found) == count:
                break
        return list(found.values())

    def _first(self, held_out: bool, seed: int, index: int) -> tuple[Prompt, Any]:
        """Return the first of several draws that is held out, or the first that is not."""
        for attempt in range(_TRIES):
            drawn = self.draw(seed, index, attempt)
            if drawn is not None and self.holds_out(drawn[1]) == held_out:
                return drawn
        raise ValueError(
            f"{type(self).__name__} expects options with problems to "
            f"{'hold out' if held_out else 'train on'}, got none of {self.name!r} in {_TRIES} "
            f"tries."
        )
