"""A causal convolution over a few tokens, each channel by itself, and the activation after it."""

import torch
from torch import Tensor, nn

from funcrl.core import numerics
from funcrl.core.arguments import checked
from funcrl.ops.streams import complete_conv, last_tokens, tokens_since


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
    history, resets = complete_conv(x, weight, history, resets)
    length, taps = x.shape[-2], weight.shape[-1]
    wide = numerics.at_least_float32(x.dtype)
    stream, since = torch.cat((history, x), dim=-2), tokens_since(resets)
    weight = weight.to(x.dtype).to(wide)
    total = x.new_zeros(x.shape, dtype=wide)
    for tap in range(taps):
        seen = (since >= taps - 1 - tap)[..., None]
        read = torch.where(seen, stream[..., tap : tap + length, :].to(wide), 0)
        total = total + weight[:, tap] * read
    return nn.functional.silu(total).to(x.dtype), last_tokens(x, history, resets)
