"""Functions that find the answer in a completion, and that compare numbers by value."""

import re
from decimal import Decimal

from funcrl.core.arguments import checked

# 1234, 1,234, -12.50 and .5, with a dollar sign or without; a full stop may end the sentence.
_NUMBER = re.compile(r"([-+]?)\$?((?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+)\.?")
# A whole number without a letter, sign, point or per cent beside it. The - of 2-3 is no sign.
_WHOLE = re.compile(
    r"(?<![^\W_])(?<![.,])(?<!(?<![\w)])[-+\u2212])\d+(?:,\d{3})*"
    r"(?![\d,]*\.?\d|[^\W_]|\s*%|\s\.\d)"
)
_MARK = "####"


@checked
def marked_answer(text: str) -> str:
    """Return what stands after the last `####`, "" when there is none.

    Example:
        >>> from funcrl.tasks import marked_answer
        >>> marked_answer("2 + 3 = 5. #### 5"), marked_answer("It is 5.")
        ('5', '')
    """
    _, mark, after = text.rpartition(_MARK)
    return after.strip() if mark else ""


@checked
def tagged_answer(text: str) -> str:
    """Return what stands in the last `<answer>...</answer>`, "" when there is none.

    Example:
        >>> from funcrl.tasks import tagged_answer
        >>> tagged_answer("Well, <answer> 5 </answer>")
        '5'
    """
    found = re.findall(r"<answer>((?:(?!<answer>).)*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else ""


@checked
def boxed_answer(text: str) -> str:
    r"""Return what stands in the last `\boxed{...}`, "" when there is none, or no end of it.

    Example:
        >>> from funcrl.tasks import boxed_answer
        >>> boxed_answer(r"So \boxed{2}, that is \boxed{\frac{1}{2}}.")
        '\\frac{1}{2}'
    """
    _, mark, after = text.rpartition("\\boxed{")
    depth = 1 if mark else 0
    for place, char in enumerate(after):
        depth += (char == "{") - (char == "}")
        if depth == 0 and mark:
            return after[:place].strip()
    return ""


@checked
def last_number(text: str) -> str:
    """Return the last whole number in a text, "" when there is none.

    A number with a sign, a per cent sign, decimals or letters beside it does not count.

    Example:
        >>> from funcrl.tasks import last_number
        >>> last_number("4 + 7 is 11, so it is 13.")
        '13'
    """
    found = _WHOLE.findall(text)
    return found[-1].replace(",", "") if found else ""


@checked
def same_number(answer: str, gold: str) -> bool:
    """Return whether an answer is a number, nothing but a number, and equal to `gold`.

    A dollar sign before it, correct thousands separators, zeros after the point and a full stop do
    not matter. Units, words, percent signs, fractions and several numbers do: what they stand for
    is a guess.

    Example:
        >>> from funcrl.tasks import same_number
        >>> same_number("$1,234.00", "1234"), same_number("12,34", "1234")
        (True, False)
        >>> same_number("18 thousand", "18"), same_number("18 or 20", "18")
        (False, False)
    """
    found, wanted = number_of(answer), number_of(gold)
    if wanted is None:
        raise ValueError(f"same_number expects gold to be a number, got {gold!r}.")
    return found is not None and found == wanted


@checked
def number_of(text: str) -> Decimal | None:
    """Return the value of a text that is one number, as `same_number` reads it; None otherwise.

    Example:
        >>> from funcrl.tasks import number_of
        >>> number_of("$1,234.50"), number_of("two")
        (Decimal('1234.50'), None)
    """
    match = _NUMBER.fullmatch(text.strip()) if text.isascii() else None
    return Decimal(match[1] + match[2].replace(",", "")) if match else None
