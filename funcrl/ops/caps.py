"""A soft cap of logits, and its slope."""

import torch
from torch import Tensor

from funcrl.core.numerics import at_least_float32


def cap_logits(logits: Tensor, cap: float | None) -> Tensor:
    """Return `cap * tanh(logits / cap)`, rounded once, or the logits themselves without a cap."""
    if cap is None:
        return logits
    wide = logits.to(at_least_float32(logits.dtype))
    return (torch.tanh(wide / cap) * cap).to(logits.dtype)


def cap_gradient(grad: Tensor, capped: Tensor, cap: float | None) -> Tensor:
    """Return the gradient of logits, given that of `cap_logits`, whose result is `capped`."""
    if cap is None:
        return grad
    ratio = capped.to(at_least_float32(capped.dtype)) / cap
    return (grad * (1 - ratio * ratio)).to(grad.dtype)
