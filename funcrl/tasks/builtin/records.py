"""Tasks whose problems are read from files of two splits."""

from collections.abc import Sequence

from funcrl.tasks.contracts import Prompt, Task, Tokenizer
from funcrl.tasks.rows.split import epochs, spread


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
