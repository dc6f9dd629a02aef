"""One finished sample, as vLLM says it."""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Spoken(NamedTuple):
    """One finished sample."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"


def spoken(tokens: Sequence[int], logprobs: Sequence[float], finish_reason: str | None) -> Spoken:
    """Return a sample; raise if there was no distribution to draw it from.

    Args:
        tokens: that were drawn.
        logprobs: of each.
        finish_reason: vLLM's.

    Example:
        >>> from funcrl.generators.vllm_spoken import spoken
        >>> spoken([3], [float("nan")], "length")
        Traceback (most recent call last):
        FloatingPointError: generate expects logits that leave a distribution to draw from, got \
log-probabilities of [nan]; have the parameters diverged?
    """
    if not all(map(math.isfinite, logprobs)):
        raise FloatingPointError(
            f"generate expects logits that leave a distribution to draw from, got "
            f"log-probabilities of {list(logprobs[:3])}; have the parameters diverged?"
        )
    return Spoken(list(tokens), list(logprobs), finish_reason or "")
