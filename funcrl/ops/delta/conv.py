"""A causal convolution over a few tokens, each channel by itself, and the activation after it."""

import torch
from torch import Tensor, nn

from funcrl.core import checks, numerics
from funcrl.core.arguments import checked


@checked
def short_conv(
    x: Tensor, weight: Tensor, history: Tensor | None = None, resets: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return `silu(sum_j weight[:, j] x[t - K + 1 + j])` [..., T, E], and the new history.

    The sum is in at least float32, and is rounded to the dtype of `x` once, after the activation.

    Args:
        x: [..., T, E].
        weight: [E, K], the last column for the token itself.
        history: [..., K - 1, E], the tokens before the first one; zeros when left out.
        resets: [..., T] bool, True where a sequence begins: no token reads one before it. The
            history that is returned is 0 before the last reset.

    Example:
        >>> import torch, funcrl
        >>> x, weight = torch.tensor([[1.0], [2.0]]), torch.tensor([[1.0, 1.0]])
        >>> out, history = funcrl.ops.short_conv(x, weight)
        >>> out.squeeze(-1), history  # silu(1) and silu(1 + 2)
        (tensor([0.7311, 2.8577]), tensor([[2.]]))
    """
    history, resets = complete("short_conv", x, weight, history, resets)
    length, taps = x.shape[-2], weight.shape[-1]
    wide = numerics.at_least_float32(x.dtype)
    stream = torch.cat((history, x), dim=-2)
    since = tokens_since(resets)
    weight = weight.to(x.dtype).to(wide)
    total = x.new_zeros(x.shape, dtype=wide)
    for tap in range(taps):
        read = stream[..., tap : tap + length, :].to(wide)
        seen = (since >= taps - 1 - tap)[..., None]
        total = total + weight[:, tap] * torch.where(seen, read, 0)
    return nn.functional.silu(total).to(x.dtype), last_tokens(stream, since, taps - 1)


def tokens_since(resets: Tensor) -> Tensor:
    """Return the number of tokens since the last reset [..., T]: 2^30 and more where none was."""
    places = torch.arange(resets.shape[-1], device=resets.device)
    starts = torch.where(resets, places, -(2**30))
    return places - starts.cummax(dim=-1).values


def last_tokens(stream: Tensor, since: Tensor, count: int) -> Tensor:
    """Return the last tokens [..., count, E] of a stream, 0 where they are before a reset."""
    before = torch.arange(count - 1, -1, -1, device=since.device)
    seen = since[..., -1:] >= before
    return torch.where(seen[..., None], stream[..., stream.shape[-2] - count :, :], 0)


def complete(
    function: str, x: Tensor, weight: Tensor, history: Tensor | None, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the history and the resets, zeros and False where left out, once all are checked."""
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
