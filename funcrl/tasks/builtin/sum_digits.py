"""The default task: add up a few digits."""

from collections.abc import Iterable, Mapping, Sequence

from funcrl.core import checks, rng
from funcrl.tasks.answers import last_number
from funcrl.tasks.builtin.generated import GeneratedTask
from funcrl.tasks.contracts import Prompt, Tokenizer
from funcrl.tasks.tokenizers import CharTokenizer

_MOST_LISTED = 4  # digits


class SumDigits(GeneratedTask):
    """Sums such as `4+7+2=`, answered by `13`; with a model's own tokenizer, sums in words.

    A tenth of all prompts is held out for evaluation: which ones, is a hash of their digits.

    Args:
        digits: how many to add.
        tokenizer: a pretrained model's; one of characters when left out.

    Example:
        >>> import funcrl
        >>> task = funcrl.tasks.SumDigits(digits=3)
        >>> task.reward(funcrl.tasks.Prompt("4+7+2=", "13"), "13")
        {'correct': 1.0}
    """

    name = "sum_digits"

    def __init__(self, digits: int = 3, tokenizer: Tokenizer | None = None) -> None:
        checks.check_range("SumDigits", "digits", digits, 2, 9)
        self.digits = digits
        self.in_words = tokenizer is not None
        self.tokenizer: Tokenizer = tokenizer or CharTokenizer("0123456789+=")

    def draw(self, *seed: int) -> tuple[Prompt, tuple[int]]:
        """Return a sum and the number that its digits make."""
        number = rng.fold_in(*seed) % 10**self.digits
        return self._prompt(number), (number,)

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return 1 for the sum and 0 for anything else; in words, the last number counts."""
        return {"correct": float(self.extract(completion) == prompt.answer)}

    def extract(self, completion: str) -> str:
        """Return the answer that a completion votes for."""
        return last_number(completion) if self.in_words else completion

    def eval_prompts(self, count: int) -> Sequence[Prompt]:
        """Return held-out prompts, spread over all of them by the order of their hashes."""
        numbers: Iterable[int] = range(10**self.digits)
        if self.digits > _MOST_LISTED:  # too many to hash each of them
            drawn = (rng.fold_in(2, index) for index in range(20 * count + 1000))
            numbers = {number % 10**self.digits for number in drawn}
        held_out = [number for number in numbers if self.holds_out((number,))]
        held_out.sort(key=lambda number: rng.fold_in(1, number))
        return [self._prompt(number) for number in held_out[:count]]

    def _prompt(self, number: int) -> Prompt:
        digits = f"{number:0{self.digits}d}"
        answer = str(sum(map(int, digits)))
        if self.in_words:
            return Prompt(f"What is {' + '.join(digits)}? Answer with the number only.", answer)
        return Prompt("+".join(digits) + "=", answer)
