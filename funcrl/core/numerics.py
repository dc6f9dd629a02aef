"""Dtypes of sums, and sums in a fixed order."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from funcrl.core.arguments import checked

__all__ = ["at_least_float32", "exp_ratio", "power_of_two"]  # what users see

MAX_LOG_RATIO = 20.0  # the largest logarithm of a ratio that is exponentiated


@checked
def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums and small differences are safe: `dtype`, or float32.

    Example:
        >>> import torch
        >>> from funcrl import numerics
        >>> numerics.at_least_float32(torch.bfloat16), numerics.at_least_float32(torch.float64)
        (torch.float32, torch.float64)
    """
    return torch.promote_types(dtype, torch.float32)


@checked
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


@checked
def power_of_two(values: Tensor) -> Tensor:
    """Return the power of two that brings the largest magnitude of `values` to between 1 and 2.

    Quotients by it are exact, so that a sum or a deviation taken of them has the same digits, but
    no square of theirs overflows or vanishes. It is a constant to a gradient, and at least the
    dtype's smallest normal number.

    Example:
        >>> import torch
        >>> from funcrl import numerics
        >>> numerics.power_of_two(torch.tensor([0.5, -6.0]))
        tensor(4.)
    """
    largest = values.detach().abs().amax().clamp(min=torch.finfo(values.dtype).tiny)
    # The mantissa is between 1/2 and 1 and the quotient is exact; without the 2 it could overflow.
    mantissa = torch.frexp(largest).mantissa
    return largest / (2 * mantissa)


Value = TypeVar("Value")


def pairwise(parts: Iterable[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Return the sum of parts in a fixed order: of neighbours, then of neighbouring sums.

    Halves and quarters of the parts, summed apart and then added up, give the same bits. Few sums
    are alive at a time: the logarithm of the number of parts.

    Args:
        parts: at least one.
        add: of two sums, the left one first.

    Example:
        >>> from funcrl.core.numerics import pairwise
        >>> pairwise("abcde", lambda left, right: f"({left} + {right})")
        '(((a + b) + (c + d)) + e)'
    """
    waiting: list[tuple[int, Value]] = []  # the number of parts, and their sum

    def join() -> None:
        (count, left), (other, right) = waiting.pop(-2), waiting.pop()
        waiting.append((count + other, add(left, right)))

    for part in parts:
        waiting.append((1, part))
        while len(waiting) > 1 and waiting[-1][0] == waiting[-2][0]:
            join()
    while len(waiting) > 1:
        join()
    return waiting[0][1]


def pairwise_sum(parts: Iterable[Tensor]) -> Tensor:
    """Return the `pairwise` sum of tensors in at least float32.

    Example:
        >>> import torch
        >>> from funcrl.core.numerics import pairwise_sum
        >>> parts = [torch.tensor(1e8), torch.tensor(3.0), torch.tensor(-1e8), torch.tensor(4.0)]
        >>> pairwise_sum(parts), sum(parts)
        (tensor(0.), tensor(4.))
    """
    wide = (part.to(at_least_float32(part.dtype)) for part in parts)
    return pairwise(wide, torch.add)


def in_blocks(values: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return numbers [..., I] as shares of their block's scale, and the scales [..., I / size].

    A scale is the largest magnitude of `size` numbers of a row, which is a multiple of it.
    """
    blocks = values.unflatten(-1, (-1, size))
    scales = blocks.abs().amax(-1)
    # A block of zeros has the scale 0.
    return (blocks / scales.where(scales > 0, 1.0).unsqueeze(-1)).flatten(-2), scales


def of_levels(codes: Tensor, scales: Tensor, levels: Tensor) -> Tensor:
    """Return the numbers [..., I] that are levels, by their codes, times their block's scale."""
    # Several times as fast as levels[codes] on a CPU.
    values = levels.index_select(0, codes.flatten().int())
    blocks = values.view(*scales.shape, codes.shape[-1] // scales.shape[-1])
    return (blocks * scales.unsqueeze(-1)).flatten(-2)
