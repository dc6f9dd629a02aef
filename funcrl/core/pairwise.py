"""Sums in a fixed order, which halves and quarters of the parts have as well."""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor

from funcrl.core.numerics import at_least_float32

Value = TypeVar("Value")


def pairwise(parts: Iterable[Value], add: Callable[[Value, Value], Value]) -> Value:
    """Return the sum of parts in a fixed order: of neighbours, then of neighbouring sums.

    Halves and quarters of the parts, summed apart and then added up, give the same bits. Few sums
    are alive at a time: the logarithm of the number of parts.

    Args:
        parts: at least one.
        add: of two sums, the left one first.

    Example:
        >>> from funcrl.core.pairwise import pairwise
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
        >>> from funcrl.core.pairwise import pairwise_sum
        >>> parts = [torch.tensor(1e8), torch.tensor(3.0), torch.tensor(-1e8), torch.tensor(4.0)]
        >>> pairwise_sum(parts), sum(parts)
        (tensor(0.), tensor(4.))
    """
    wide = (part.to(at_least_float32(part.dtype)) for part in parts)
    return pairwise(wide, torch.add)
