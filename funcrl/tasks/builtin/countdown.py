"""Countdown: reach a number by adding, subtracting, multiplying and dividing others."""

import ast
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from funcrl.core import checks, rng
from funcrl.tasks.answers import tagged_answer
from funcrl.tasks.builtin.generated import GeneratedTask
from funcrl.tasks.contracts import Prompt, Tokenizer

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
