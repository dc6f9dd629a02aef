"""One finished completion, as vLLM gives it, and many of them as `Samples`."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from funcrl.config import Sampling, VLLMConfig
from funcrl.core.types import Samples
from funcrl.generators.contracts import Pushed
from funcrl.rl.batching import pad_rows


class Completion(NamedTuple):
    """One finished completion."""

    tokens: list[int]
    logprobs: list[float]
    finish_reason: str  # "stop" or "length"


def check_logprobs(logprobs: Sequence[float]) -> list[float]:
    """Return log-probabilities; raise if there was no distribution to draw from."""
    if not all(map(math.isfinite, logprobs)):
        raise FloatingPointError(
            f"generate expects logits that leave a distribution to draw from, got "
            f"log-probabilities of {list(logprobs[:3])}; have the parameters diverged?"
        )
    return list(logprobs)


def to_samples(
    completions: Sequence[Completion], sampling: Sampling, config: VLLMConfig, policy: Pushed
) -> Samples:
    """Return completions, group-major, as samples of the policy on the device of its parameters.

    The configuration says which log-probabilities the engine keeps.
    """
    device = next(iter(policy.params.values())).device
    kept = pad_rows([each.logprobs for each in completions], torch.float32, device)
    mask = pad_rows([[1] * len(each.tokens) for each in completions], torch.bool, device)
    # The two are one unless the temperature is not 1 or some tokens are never drawn.
    alike = sampling.temperature == 1 and not sampling.truncates
    other = kept if alike else kept.masked_fill(mask, math.nan)
    of_policy = config.logprobs == "policy"
    return Samples(
        tokens=pad_rows([each.tokens for each in completions], torch.int64, device),
        mask=mask,
        logprobs=other if of_policy else kept,
        policy_logprobs=kept if of_policy else other,
        finish_reasons=tuple(each.finish_reason for each in completions),
        policy_version=policy.version,
    )
