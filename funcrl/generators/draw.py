"""From logits to tokens: the sampling distribution, and a draw that depends on its row alone."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from funcrl.config import Sampling
from funcrl.core import checks, numerics
from funcrl.core.arguments import checked
from funcrl.ops.arithmetic import log_softmax as native_log_softmax
from funcrl.ops.exact.scores import scores_impl
from funcrl.ops.truncation import Truncation, truncate

LogSoftmaxFn: TypeAlias = Callable[[Tensor, float], Tensor]  # (logits [B, V], temperature)

# Sorting a vocabulary is slow, and the nucleus is nearly always within the most likely few.
_LIKELY = 1024


@checked
def sampling_logprobs(
    logits: Tensor, sampling: Sampling, log_softmax: LogSoftmaxFn = native_log_softmax
) -> Tensor:
    """Return the log-probabilities [B, V] of the distribution that `sampling` draws from.

    Temperature, then top-k, then top-p of what is left, then min-p, then normalised: -inf for what
    is left out. Tokens as likely as the last one that is kept are all kept, so that top-k may keep
    more than k (logits of bfloat16 are often equal), and no order of the vocabulary matters. At
    temperature 0 the most likely token (the first of equals) has them all.

    Args:
        logits: [B, V].
        sampling: whose temperature, top_k, top_p and min_p to use.
        log_softmax: of the network's numerics; torch's when left out.

    Example:
        >>> import torch, funcrl
        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> sampling = funcrl.generators.Sampling(top_k=2)
        >>> funcrl.generators.sampling_logprobs(logits, sampling).exp()
        tensor([[0.6250, 0.3750, 0.0000]])
    """
    checks.check_rank("sampling_logprobs", "logits", logits, "BV")
    if sampling.temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        wide = numerics.at_least_float32(logits.dtype)
        return torch.full_like(logits, -torch.inf, dtype=wide).scatter(-1, best, 0.0)
    # In their own dtype, as the trainer has them: a kernel may sum another one in another order.
    logprobs = log_softmax(logits, sampling.temperature)
    return truncate(logprobs, truncation_of(sampling), log_softmax, likely=_LIKELY)


def truncation_of(sampling: Sampling) -> Truncation:
    """Return which tokens are left out of what is drawn."""
    return Truncation(sampling.top_k, sampling.top_p, sampling.min_p)


@checked
def draw(logprobs: Tensor, uniform: Tensor) -> Tensor:
    """Return a token a row [B], by inverting the cumulative distribution.

    The first token at which the cumulative probability exceeds `uniform`: a function of its own row
    and number, so that no neighbour in the batch matters. A token of probability 0 is never drawn.

    Args:
        logprobs: [B, V], normalised.
        uniform: [B] in [0, 1), float64.

    Example:
        >>> import torch, funcrl
        >>> logprobs = torch.tensor([[0.5, 0.3, 0.2]]).log().expand(3, 3)
        >>> uniform = torch.tensor([0.0, 0.79, 0.81], dtype=torch.float64)
        >>> funcrl.generators.draw(logprobs, uniform)
        tensor([0, 1, 2])
    """
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # Rounding leaves the total near 1, not at it; scaled, the last token keeps its whole share.
    target = uniform[:, None] * cumulative[:, -1:]
    tokens = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    return tokens.clamp_(max=logprobs.shape[-1] - 1)  # only where they are not numbers


@checked
def draw_tokens(
    logits: Tensor,
    counts: Tensor,
    uniform: Tensor,
    sampling: Sampling,
    log_softmax: LogSoftmaxFn = native_log_softmax,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens [B], their log-probabilities as drawn, and those under the policy itself.

    Args:
        logits: [B, V].
        counts: [B], tokens that each sample has already: a stop token is not drawn too early.
        uniform: [B] in [0, 1), float64.
        sampling: how to draw.
        log_softmax: of the network's numerics; torch's when left out. On a GPU one kernel does its
            part where nothing is truncated, with the bits of exact numerics.

    Example:
        >>> import torch, funcrl
        >>> logits = torch.tensor([[0.5, 0.3, 0.2]]).log()
        >>> numbers = torch.zeros(1), torch.tensor([0.6], dtype=torch.float64)
        >>> sampling = funcrl.generators.Sampling(top_k=2)
        >>> funcrl.generators.draw_tokens(logits, *numbers, sampling)
        (tensor([0]), tensor([-0.4700]), tensor([-0.6931]))
    """
    allowed = logits
    if sampling.min_tokens and sampling.stop_tokens:
        early = counts < sampling.min_tokens
        allowed = logits.clone()
        for token in sampling.stop_tokens:  # a list of them would be copied to a GPU each time
            allowed[:, token].masked_fill_(early, -torch.inf)
    if _has_kernel(allowed, sampling):
        from funcrl.ops.exact.cuda import scores as on_gpu  # needs triton

        tokens, chosen = on_gpu.draw(allowed, uniform, sampling.temperature)
        if allowed is logits and sampling.temperature == 1:
            return tokens, chosen, chosen
        return tokens, chosen, scores_impl(logits, tokens, 1.0)[0]
    logprobs = sampling_logprobs(allowed, sampling, log_softmax)
    tokens = draw(logprobs, uniform)
    chosen = logprobs.gather(1, tokens[:, None]).squeeze(1)
    if allowed is logits and sampling.temperature == 1 and not sampling.truncates:
        return tokens, chosen, chosen
    policy = log_softmax(logits, 1.0)
    return tokens, chosen, policy.gather(1, tokens[:, None]).squeeze(1)


def _has_kernel(logits: Tensor, sampling: Sampling) -> bool:
    """Return whether a kernel draws in one pass: it leaves no token out that is not at -inf."""
    whole = sampling.temperature > 0 and not sampling.truncates
    return whole and logits.device.type == "cuda" and logits.dtype != torch.float64
