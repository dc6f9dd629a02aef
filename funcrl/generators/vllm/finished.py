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
        >>> from funcrl.generators.vllm.finished import spoken
        >>> spoken([3], [-0.5], "length")
        Spoken(tokens=[3], logprobs=[-0.5], finish_reason='length')
    """
    return Spoken(list(tokens), finite(logprobs), finish_reason or "")


def finite(logprobs: Sequence[float]) -> list[float]:
    """Return log-probabilities; raise if one is no number.

    Example:
        >>> from funcrl.generators.vllm.finished import finite
        >>> finite([float("nan")])
        Traceback (most recent call last):
        FloatingPointError: generate expects logits that leave a distribution to draw from, got \
log-probabilities of [nan]; have the parameters diverged?
    """
    if not all(map(math.isfinite, logprobs)):
        raise FloatingPointError(
            f"generate expects logits that leave a distribution to draw from, got "
            f"log-probabilities of {list(logprobs[:3])}; have the parameters diverged?"
        )
    return list(logprobs)
