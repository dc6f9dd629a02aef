"""How fast a gated delta layer forgets, and how much it learns of a token."""

import torch
from torch import Tensor, nn

from funcrl.core import numerics
from funcrl.core.arguments import checked


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
