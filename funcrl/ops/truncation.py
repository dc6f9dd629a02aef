"""Distributions of which only the likelier tokens are drawn: top-k, top-p and min-p."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.arguments import Fraction, Natural, TopP, check_fields, checked
from funcrl.ops.arithmetic import log_softmax


@dataclass(frozen=True)
class Truncation:
    """Which tokens may be drawn, in the order top-k, top-p, min-p; all when left out."""

    top_k: Natural = 0
    """Only the k most likely tokens (ties at the last place included); 0 for all."""
    top_p: TopP = 1.0
    """Only the most likely tokens that make up this probability (ties at the last included)."""
    min_p: Fraction = 0.0
    """Only tokens at least this probability times that of the most likely one."""

    def __post_init__(self) -> None:
        check_fields(self)

    def __bool__(self) -> bool:
        """Whether some tokens are left out."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def truncate(
    logprobs: Tensor,
    truncation: Truncation,
    log_softmax: Callable[[Tensor, float], Tensor] = log_softmax,
    likely: int | None = None,
) -> Tensor:
    """Return log-probabilities [..., V] with -inf for what is left out, normalised again.

    With `likely` the most likely tokens that make up top-p are looked for among so many first,
    since a vocabulary is slow to sort: how many suffice depends on the values, so that a graph
    cannot have it.
    """
    for smallest in _thresholds(truncation, likely):
        # A log-probability below its row's threshold is out; the rest is normalised again.
        kept = logprobs.masked_fill(logprobs < smallest(logprobs), -torch.inf)
        logprobs = log_softmax(kept, 1.0)
    return logprobs


@checked
def truncated_logits(
    logits: Tensor, tokens: Tensor, truncation: Truncation, temperature: float = 1.0
) -> Tensor:
    """Return logits [..., V] with -inf for the tokens that are not drawn, in at least float32.

    A row's own token is kept, whatever the others are: it was drawn by a policy that may since have
    been updated, and is otherwise at -inf, where a ratio is 0 and has no gradient. Which tokens are
    kept is a constant, without a gradient.

    Args:
        logits: [..., V].
        tokens: [...] int64, the token that was drawn in each row.
        truncation: which others may be drawn.
        temperature: that of sampling; the logits are not divided by it.

    Example:
        >>> import torch, funcrl
        >>> logits, tokens = torch.tensor([[3.0, 2.0, 1.0, 0.0]] * 2), torch.tensor([0, 3])
        >>> funcrl.ops.truncated_logits(logits, tokens, funcrl.ops.Truncation(top_k=2))
        tensor([[3., 2., -inf, -inf],
                [3., 2., -inf, 0.]])
    """
    with torch.no_grad():
        logprobs = log_softmax(logits.detach(), temperature)
        out = truncate(logprobs, truncation) == -torch.inf
        out = out.scatter(-1, tokens[..., None], torch.zeros_like(out[..., :1]))
    return logits.to(numerics.at_least_float32(logits.dtype)).masked_fill(out, -torch.inf)


def _thresholds(truncation: Truncation, likely: int | None) -> list[Callable[[Tensor], Tensor]]:
    found: list[Callable[[Tensor], Tensor]] = []
    if truncation.top_k > 0:
        found.append(lambda logprobs: _kth_largest(logprobs, truncation.top_k))
    if truncation.top_p < 1:
        found.append(lambda logprobs: _nucleus_edge(logprobs, truncation.top_p, likely))
    if truncation.min_p > 0:
        # log_softmax moves all log-probabilities of a row alike, so the gap to the best stays.
        gap = math.log(truncation.min_p)
        found.append(lambda logprobs: logprobs.amax(dim=-1, keepdim=True) + gap)
    return found


def _kth_largest(logprobs: Tensor, k: int) -> Tensor:
    return logprobs.topk(min(k, logprobs.shape[-1]), dim=-1).values[..., -1:]


def _nucleus_edge(logprobs: Tensor, top_p: float, likely: int | None) -> Tensor:
    """Return the smallest log-probability of the shortest prefix, most likely first, of mass p."""
    vocabulary = logprobs.shape[-1]
    ordered = logprobs.topk(min(likely or vocabulary, vocabulary), dim=-1).values
    mass = ordered.exp().cumsum(dim=-1, dtype=torch.float64)
    if ordered.shape[-1] < vocabulary and bool((mass[..., -1] < top_p).any()):
        return _nucleus_edge(logprobs, top_p, vocabulary)
    # A token is in while the mass before it is below p; the first always is.
    count = (mass - ordered.exp() < top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    return ordered.gather(-1, count - 1)
