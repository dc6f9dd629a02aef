"""Where a stop string ends a completion: the one definition for what draws and for what reads.

A stop string counts if its last character comes after the first `min_tokens` tokens. The one that
ends first ends the completion, and of several with one end the first in `Sampling.stop`: what vLLM
does, and what looking after each character would find.
"""

from collections.abc import Callable, Sequence
from typing import TypeAlias

from funcrl.config.generation import Sampling
from funcrl.core.arguments import checked

DecodeFn: TypeAlias = Callable[[list[int]], str]  # from tokens to text

# Continuation bytes that a window of tokens may cut from a character decode to so many at most.
_CUT_CHARACTERS = 3


@checked
def find_stop(text: str, start: int, stop: Sequence[str]) -> tuple[int, str] | None:
    """Return where the first stop string to end after `start` begins, and which one it is.

    Args:
        text: of a completion.
        start: how many characters at its front are too early for a stop string to end in.
        stop: the strings; of those that end together the first one counts.
    """
    found = []
    for order, string in enumerate(stop):
        at = text.find(string, max(start - len(string) + 1, 0))
        if at >= 0:
            found.append((at + len(string), order, at))
    if not found:
        return None
    _, order, at = min(found)
    return at, stop[order]


@checked
def has_stop_string(tokens: list[int], sampling: Sampling, decode: DecodeFn | None) -> bool:
    """Return whether the last token finishes a stop string of a completion without any before.

    Without a decode function there is none.
    """
    if decode is None or not sampling.stop or len(tokens) <= sampling.min_tokens:
        return False
    # Before the last token's text: all but one character of a stop string, and what may be cut.
    needed, window = max(map(len, sampling.stop)) - 1 + _CUT_CHARACTERS, 4
    before = decode(tokens[-window:-1])
    while len(before) < needed and window < len(tokens):
        window *= 2
        before = decode(tokens[-window:-1])
    text = decode(tokens[-window:])
    return find_stop(text, _num_settled(before, text), sampling.stop) is not None


@checked
def cut_at_stop(tokens: list[int], sampling: Sampling, decode: DecodeFn) -> tuple[str, str]:
    """Return a completion's text before the stop string that ends it, and that string.

    It is the whole text, and "", where no stop string does. The tokens are without a stop token.
    """
    text = decode(tokens)
    if not sampling.stop:
        return text, ""
    start = _num_settled(decode(tokens[: sampling.min_tokens]), text)
    at, stop = find_stop(text, start, sampling.stop) or (len(text), "")
    return text[:at], stop


def _num_settled(before: str, text: str) -> int:
    """Return how many characters the tokens that follow have left as they were.

    The last one of `before` may be a part of a character that they complete.
    """
    pairs = enumerate(zip(before, text, strict=False))
    return next((at for at, (old, new) in pairs if old != new), min(len(before), len(text)))
