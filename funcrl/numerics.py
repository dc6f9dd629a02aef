"""Arithmetic that needs a bound, in one place so that there is one bound."""

from torch import Tensor

MAX_LOG_RATIO = 20.0


def exp_ratio(log_ratio: Tensor) -> Tensor:
    """Return `exp(log_ratio)` with the exponent held in [-20, 20], as verl holds it.

    A generator may report a log-probability of -100 or -9999 for a token that the trainer finds
    likely. Its ratio would overflow to infinity, and one such token would make the whole batch's
    gradient NaN. At e^20 every clip that bounds that side is long active; beyond it the
    gradient is 0.

    Example:
        >>> import torch
        >>> from funcrl import numerics
        >>> numerics.exp_ratio(torch.tensor([0.0, 9999.0]))
        tensor([1.0000e+00, 4.8517e+08])
    """
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
