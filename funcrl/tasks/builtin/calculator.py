"""An environment: the policy multiplies two numbers, and may use a calculator."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from funcrl.core import checks, rng
from funcrl.tasks.answers import last_number
from funcrl.tasks.builtin.generated import GeneratedTask, is_held_out
from funcrl.tasks.contracts import Environment, Prompt, Tokenizer
from funcrl.tasks.tokenizers import CharTokenizer


class Desk(NamedTuple):
    """The state of an episode."""

    answer: str = ""  # the last completion
    display: str | None = None  # what the calculator shows; None after an answer
    called: bool = False  # whether the calculator has understood a call


class Calculator(GeneratedTask, Environment):
    """The prompt `38*27=` is answered by `1026`; `[38*27]` calls a calculator first.

    A call ends the policy's turn. The calculator's result follows, `1026;`, or `?;` for anything
    but a product. The next completion is the answer, or another call.
    With a model's own tokenizer the product is asked for in words, and a call is written
    `<calc>38*27</calc>`. Rewards are `correct` and `called` (the calculator understood a call), a
    tenth as much.

    A tenth of all products is held out for evaluation: which ones, is a hash of their numbers.

    Args:
        digits: of each factor.
        tokenizer: a pretrained model's; one of characters when left out.

    Example:
        >>> import funcrl
        >>> desk = funcrl.tasks.Calculator(digits=2)
        >>> state = desk.act(desk.begin(funcrl.tasks.Prompt("38*27=", "1026")), "[38*27]")
        >>> desk.observe(state)
        '1026;'
        >>> state = desk.act(state, "1026")
        >>> desk.observe(state) is None, desk.reward(funcrl.tasks.Prompt("38*27=", "1026"), state)
        (True, {'correct': 1.0, 'called': 1.0})
    """

    name = "calculator"
    reward_weights: Mapping[str, float] = {"correct": 1.0, "called": 0.1}
    max_turns = 3

    def __init__(self, digits: int = 2, tokenizer: Tokenizer | None = None) -> None:
        checks.check_range("Calculator", "digits", digits, 1, 6)
        self.digits = digits
        self.in_words = tokenizer is not None
        self.tokenizer: Tokenizer = tokenizer or CharTokenizer("0123456789*=[];?")
        self._open, self._close = ("<calc>", "</calc>") if self.in_words else ("[", "]")
        self.stop = (self._close,)

    def draw(self, *seed: int) -> tuple[Prompt, tuple[int, int]]:
        """Return a product and its factors."""
        lowest, count = 10 ** (self.digits - 1), 9 * 10 ** (self.digits - 1)
        a, b = (lowest + rng.fold_in(*seed, place) % count for place in (0, 1))
        return self._prompt(a, b), (a, b)

    def holds_out(self, key: tuple[int, int]) -> bool:
        """Return whether a product is kept for evaluation, as the one of swapped factors is."""
        return is_held_out(*sorted(key))

    def begin(self, prompt: Prompt) -> Desk:
        """Return an empty desk."""
        del prompt
        return Desk()

    def act(self, state: Desk, completion: str) -> Desk:
        """Return the desk after a call, or an answer."""
        _, mark, call = completion.rpartition(self._open)
        if not (mark and call.endswith(self._close)):
            return Desk(completion, None, state.called)
        display = self._product(call.removesuffix(self._close))
        return Desk(completion, display, state.called or display != "?")

    def observe(self, state: Desk) -> str | None:
        """Return what the calculator shows; None after an answer."""
        if state.display is None:
            return None
        return f" = {state.display}\n" if self.in_words else f"{state.display};"

    def reward(self, prompt: Prompt, state: Desk) -> Mapping[str, float]:
        """Return whether the answer is right, and whether the calculator was used."""
        answered = state.display is None and self.extract(state) == prompt.answer
        return {"correct": float(answered), "called": float(state.called)}

    def extract(self, state: Desk) -> str:
        """Return the answer that an episode votes for; in words, the last number counts."""
        return last_number(state.answer) if self.in_words else state.answer

    def demonstrate(self, prompt: Prompt) -> Sequence[str]:
        """Return a call and the answer."""
        a, b = prompt.data
        return [f"{self._open}{a}*{b}{self._close}", prompt.answer]

    def _product(self, call: str) -> str:
        """Return the product that a call asks for, "?" for anything else."""
        factors = call.replace(" ", "").split("*")
        plain = all(each.isascii() and each.isdigit() for each in factors)
        if len(factors) != 2 or not plain or max(map(len, factors)) > 2 * self.digits:
            return "?"
        return str(int(factors[0]) * int(factors[1]))

    def _prompt(self, a: int, b: int) -> Prompt:
        if not self.in_words:
            return Prompt(f"{a}*{b}=", str(a * b), (a, b))
        text = (
            f"What is {a} * {b}? Use the calculator: write {self._open}{a}*{b}{self._close} and "
            f"read the result. Then answer with the number only."
        )
        return Prompt(text, str(a * b), (a, b))
