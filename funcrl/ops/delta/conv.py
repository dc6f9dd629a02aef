"""A causal convolution over a few tokens, each channel by itself, and the activation after it."""

from torch import Tensor, nn

from funcrl.core import numerics
from funcrl.core.arguments import checked
from funcrl.ops.streams import complete_conv, conv_reads, last_tokens


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
    columns = weight.to(x.dtype).to(numerics.at_least_float32(x.dtype)).unbind(-1)
    reads = conv_reads(x, len(columns), history, resets)
    total, *others = (read * column for read, column in zip(reads, columns, strict=True))
    for product in others:
        total = total + product
    return nn.functional.silu(total).to(x.dtype), last_tokens(x, history, resets)
