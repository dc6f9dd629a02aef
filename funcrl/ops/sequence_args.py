"""Arguments of operations that go along a row of tokens, in which several sequences may begin.

Checked, and completed where they are left out: the state before the first token, and the resets.
"""

import math

import torch
from torch import Tensor

from funcrl.core import checks, numerics


def tokens_since(resets: Tensor) -> Tensor:
    """Return the number of tokens since the last reset [..., T]: 2^30 and more where none was."""
    places = torch.arange(resets.shape[-1], device=resets.device)
    starts = torch.where(resets, places, -(2**30))
    return places - starts.cummax(dim=-1).values


def conv_reads(x: Tensor, taps: int, history: Tensor, resets: Tensor) -> list[Tensor]:
    """Return what each tap of a convolution reads for each token [..., T, E], fresh, and widened.

    Args:
        x: [..., T, E].
        taps: K.
        history: [..., K - 1, E].
        resets: [..., T] bool; what is before one is read as 0.
    """
    stream = torch.cat((history, x), dim=-2).to(numerics.at_least_float32(x.dtype))
    since, length = tokens_since(resets)[..., None], x.shape[-2]
    return [
        stream[..., tap : tap + length, :].masked_fill(since < taps - 1 - tap, 0.0)
        for tap in range(taps)
    ]


def last_tokens(x: Tensor, history: Tensor, resets: Tensor) -> Tensor:
    """Return as many of the last tokens as the history has, 0 where they are before a reset.

    Args:
        x: [..., T, E].
        history: [..., K - 1, E], the tokens before the first one.
        resets: [..., T] bool.
    """
    count = history.shape[-2]
    before = torch.arange(count - 1, -1, -1, device=x.device)
    seen = tokens_since(resets)[..., -1:] >= before
    ends = torch.cat((history, x[..., max(x.shape[-2] - count, 0) :, :]), dim=-2)
    return torch.where(seen[..., None], ends[..., ends.shape[-2] - count :, :], 0)


def complete_conv(
    x: Tensor, weight: Tensor, history: Tensor | None, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the history and the resets of a short convolution, once all is checked."""
    function = "short_conv"
    checks.check_rank(function, "weight", weight, "EK")
    checks.check_floating(function, "x", x)
    if x.ndim < 2 or x.shape[-1] != len(weight) or not x.shape[-2]:
        raise ValueError(
            f"{function} expects x of shape [..., T, E] with T > 0 and E of weight's {len(weight)} "
            f"rows, got {list(x.shape)}."
        )
    before = torch.Size((*x.shape[:-2], weight.shape[-1] - 1, x.shape[-1]))
    if history is None:
        history = x.new_zeros(before)
    if resets is None:
        resets = torch.zeros(x.shape[:-1], dtype=torch.bool, device=x.device)
    checks.check_shape(function, "history", history, "x (with K - 1 tokens)", before)
    checks.check_dtype(function, "history", history, x.dtype)
    checks.check_shape(function, "resets", resets, "x (without E)", x.shape[:-1])
    checks.check_dtype(function, "resets", resets, torch.bool)
    return history, resets


def complete_scan(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the state and the resets of a gated delta scan, once all is checked."""
    function = "gated_delta_scan"
    if q.ndim < 3 or v.ndim < 3 or not q.shape[-2]:
        raise ValueError(
            f"{function} expects q [..., H, T, Ck] and v [..., H, T, Cv] with T > 0, got "
            f"{list(q.shape)} and {list(v.shape)}."
        )
    checks.check_floating(function, "q", q)
    wide, width = numerics.at_least_float32(q.dtype), v.shape[-1]
    of_values = torch.Size((*q.shape[:-1], width))
    of_state = torch.Size((*q.shape[:-2], q.shape[-1], width))
    of_resets = torch.Size((*q.shape[:-3], q.shape[-2]))
    if state is None:
        state = q.new_zeros(of_state, dtype=wide)
    if resets is None:
        resets = torch.zeros(of_resets, dtype=torch.bool, device=q.device)
    checks.check_shape(function, "k", k, "q", q.shape)
    checks.check_shape(function, "v", v, "q (with Cv numbers)", of_values)
    checks.check_shape(function, "decay", decay, "q (without Ck)", q.shape[:-1])
    checks.check_shape(function, "beta", beta, "q (without Ck)", q.shape[:-1])
    checks.check_shape(function, "state", state, "q and v ([..., H, Ck, Cv])", of_state)
    checks.check_shape(function, "resets", resets, "q ([..., T])", of_resets)
    checks.check_dtype(function, "k", k, q.dtype)
    checks.check_dtype(function, "v", v, q.dtype)
    checks.check_dtype(function, "state", state, wide)
    checks.check_dtype(function, "resets", resets, torch.bool)
    return state, resets


def flat(tensor: Tensor, axes: int) -> Tensor:
    """Return a tensor with all but its last `axes` axes as one; an empty batch is none less."""
    lead, rest = tensor.shape[: tensor.ndim - axes], tensor.shape[tensor.ndim - axes :]
    return tensor.reshape(math.prod(lead), *rest)


def token_major(x: Tensor, tokens: int) -> Tensor:
    """Return x [..., H, T, ...] in memory in which the heads of a token lie together."""
    return x.transpose(tokens, tokens - 1).contiguous().transpose(tokens, tokens - 1)


def as_samples(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: Tensor, resets: Tensor
) -> list[Tensor]:
    """Return the inputs of a scan with one leading axis B: q [B, H, T, Ck] ..., resets [B, T]."""
    parts, ends = (q, k, v, decay, beta, state, resets), (3, 3, 3, 2, 2, 3, 1)
    return [flat(part, end) for part, end in zip(parts, ends, strict=True)]
