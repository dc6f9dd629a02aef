"""Problems made from a seed, a tenth of them held out: sums of digits, and countdown."""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from funcrl.core import checks, rng
from funcrl.tasks.answers import last_number, tagged_answer
from funcrl.tasks.contracts import Prompt, Task, Tokenizer
from funcrl.tasks.rows import epochs, spread
from funcrl.tasks.tokenizers import CharTokenizer


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


_SIGNS = "+-*"
_OPERATIONS: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


class Countdown(GeneratedTask):
    """Puzzles such as "make 22 of 3, 5, 7", answered by `<answer>3 * 5 + 7</answer>`.

    Every puzzle has a solution. Rewards are `correct` (an expression of exactly these numbers, each
    used once, with the target's value) and `format` (there is an answer), a tenth as much. A tenth
    of all puzzles is held out: which ones, is a hash of their numbers and target.

    Args:
        tokenizer: the model's.
        count: numbers of a puzzle, 2 to 9.
        largest: of the numbers.
    """

    name = "countdown"
    reward_weights: Mapping[str, float] = {"correct": 1.0, "format": 0.1}

    def __init__(self, tokenizer: Tokenizer, count: int = 3, largest: int = 20) -> None:
        checks.check_range("Countdown", "count", count, 2, 9)
        checks.check_range("Countdown", "largest", largest, 2, 10_000)
        self.tokenizer = tokenizer
        self._count, self._largest = count, largest

    def draw(self, *seed: int) -> tuple[Prompt, tuple[int, ...]] | None:
        """Return a puzzle, its key the sorted numbers and the target; None for a target below 1."""
        draws = [rng.fold_in(*seed, place) for place in range(2 * self._count)]
        numbers = [1 + draw % self._largest for draw in draws[: self._count]]
        target, expression = numbers[0], str(numbers[0])
        for number, draw in zip(numbers[1:], draws[self._count :], strict=False):
            target = (target + number, target - number, target * number)[draw % 3]
            expression = f"({expression}) {_SIGNS[draw % 3]} {number}"
        if target < 1:
            return None
        return _prompt(numbers, target, expression), (*sorted(numbers), target)

    def reward(self, prompt: Prompt, completion: str) -> Mapping[str, float]:
        """Return whether the expression is right, and whether there is one."""
        answer = tagged_answer(completion)
        numbers, _, target = prompt.answer.partition("=")
        value = evaluate(answer, [int(number) for number in numbers.split()])
        return {"correct": float(value == int(target)), "format": float(bool(answer))}

    def extract(self, completion: str) -> str:
        """Return the answer that a completion votes for."""
        return tagged_answer(completion)

    def demonstrate(self, prompt: Prompt) -> str:
        """Return the expression that the puzzle was made from."""
        return f"<answer>{prompt.data}</answer>"


def evaluate(expression: str, numbers: Sequence[int]) -> Fraction | None:
    """Return the value of an expression of exactly these numbers, None for anything else."""
    if len(expression) > 200:  # a puzzle's is far shorter, and nesting costs memory
        return None
    try:
        tree = ast.parse(expression, mode="eval").body
        used: list[int] = []
        value = _value(tree, used)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    return value if Counter(used) == Counter(numbers) else None


def _value(node: ast.expr, used: list[int]) -> Fraction:
    if isinstance(node, ast.Constant) and type(node.value) is int:
        used.append(node.value)
        return Fraction(node.value)
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    raise ValueError("neither a number nor an operation")


def _prompt(numbers: Sequence[int], target: int, expression: str) -> Prompt:
    listed = ", ".join(map(str, numbers))
    text = (
        f"Using the numbers {listed}, each exactly once, with + - * / and parentheses, make "
        f"{target}. Give the expression as <answer>...</answer>."
    )
    return Prompt(text, f"{' '.join(map(str, numbers))} = {target}", expression)
