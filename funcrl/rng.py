"""Explicit seeds: an integer folded with step, rank and sample, never a hidden state."""

import operator
from typing import SupportsIndex

import torch

_MASK = (1 << 64) - 1


def fold_in(seed: SupportsIndex, *data: SupportsIndex) -> int:
    """Return a new seed in `[0, 2**63)` from a seed and any number of integers.

    Each integer is mixed in by one round of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014), so
    that neighbouring steps, ranks and samples get unrelated seeds. Order matters:
    `fold_in(s, a, b)` is `fold_in(fold_in(s, a), b)`.

    Args:
        seed: an integer or an integer 0-d tensor.
        data: integers (or integer 0-d tensors) such as the step, the rank or the sample.

    Example:
        >>> from funcrl import rng
        >>> rng.fold_in(0, 1) == rng.fold_in(0, 1), rng.fold_in(0, 1) == rng.fold_in(0, 2)
        (True, False)
        >>> rng.fold_in(7, 1, 2) == rng.fold_in(rng.fold_in(7, 1), 2)
        True
    """
    # 63 bits, because an int64 tensor holds them without a sign.
    state = _index("seed", seed) & (_MASK >> 1)
    for position, value in enumerate(data):
        state = _splitmix64(state ^ _splitmix64(_index(f"data[{position}]", value))) >> 1
    return state


def generator(
    seed: SupportsIndex, *data: SupportsIndex, device: str | torch.device = "cpu"
) -> torch.Generator:
    """Return a new `torch.Generator` on `device`, seeded with `fold_in(seed, *data)`.

    Example:
        >>> import torch
        >>> from funcrl import rng
        >>> a, b = (torch.rand(2, generator=rng.generator(0, 5)) for _ in range(2))
        >>> torch.equal(a, b)
        True
    """
    return torch.Generator(device=device).manual_seed(fold_in(seed, *data))


def _index(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"fold_in expects {name} to be an integer, got {value!r}.") from None


def _splitmix64(value: int) -> int:
    z = (value + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
