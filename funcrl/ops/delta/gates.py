"""The inputs of the gated delta rule: its gates, and the short convolution before it."""

import torch
from torch import Tensor, nn

from funcrl.core import numerics
from funcrl.core.arguments import checked
from funcrl.ops.sequence_args import complete_conv, conv_reads, last_tokens


@checked
def delta_gates(a: Tensor, b: Tensor, log_rate: Tensor, step_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log decay `-exp(log_rate) softplus(a + step_bias)`, and `sigmoid(b)`.

    The decay is in at least float32, as its sums over many tokens are exponents (arXiv:2412.06464).

    Args:
        a: [..., T, H].
        b: [..., T, H].
        log_rate: [H], the logarithm of each head's rate of forgetting.
        step_bias: [H], added to `a`.

    Example:
        >>> import torch, funcrl
        >>> zero = torch.zeros(1)
        >>> funcrl.ops.delta_gates(zero, zero, log_rate=zero, step_bias=zero)
        (tensor([-0.6931]), tensor([0.5000]))
    """
    wide = numerics.at_least_float32(a.dtype)
    steps = nn.functional.softplus(a.to(wide) + step_bias.to(wide))
    return -log_rate.to(wide).exp() * steps, torch.sigmoid(b)


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
