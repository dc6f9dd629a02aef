"""Explicit seeds: integers folded with step, rank and sample; there is no hidden state."""

import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import SupportsIndex

import numpy
import torch
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import Natural, checked

_MASK = (1 << 64) - 1
_GOLDEN, _MIX_1, _MIX_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@checked
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


@checked
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


@checked
def uniform(seeds: Tensor, count: int) -> Tensor:
    """Return [B, count] uniform numbers in [0, 1); number t of row b is of `fold_in(seeds[b], t)`.

    A row's numbers are a function of its seed alone, and the same on every device.

    Args:
        seeds: [B] int64, not negative.
        count: how many numbers a row.

    Example:
        >>> import torch
        >>> from funcrl import rng
        >>> rows = rng.uniform(torch.tensor([3, 4]), count=2)
        >>> rows.shape, bool(rows[1, 0] == (rng.fold_in(4, 0) >> 10) / 2**53)
        (torch.Size([2, 2]), True)
    """
    index = torch.arange(count, dtype=torch.int64, device=seeds.device)
    mixed = splitmix64(seeds[:, None] ^ splitmix64(index))
    # 53 of fold_in's 63 bits: all that a float64 below 1 can hold.
    return _shift_right(mixed, 11).to(torch.float64) * 2.0**-53


@checked
def permutation(length: Natural, seed: SupportsIndex, *data: SupportsIndex) -> Tensor:
    """Return the numbers below `length`, in the order of `fold_in(seed, *data, number)`.

    Example:
        >>> from funcrl import rng
        >>> order = rng.permutation(5, 3).tolist()
        >>> order == sorted(range(5), key=lambda number: rng.fold_in(3, number)), sorted(order)
        (True, [0, 1, 2, 3, 4])
    """
    numbers = torch.arange(length, dtype=torch.int64, device="cpu")
    mixed = splitmix64(fold_in(seed, *data) ^ splitmix64(numbers))
    return _shift_right(mixed, 1).argsort(stable=True)


@contextmanager
def restored_global_state() -> Iterator[None]:
    """Put the global random numbers of Python, numpy and torch's CPU back as they stood.

    For somebody else's function that may draw, where its draws must not change the caller's.

    Example:
        >>> import random
        >>> from funcrl import rng
        >>> before = random.getstate()
        >>> with rng.restored_global_state():
        ...     _ = random.random()
        >>> random.getstate() == before
        True
    """
    of_python, of_numpy = random.getstate(), numpy.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(of_python)
        numpy.random.set_state(of_numpy)


def _index(name: str, value: SupportsIndex) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"fold_in expects {name} to be an integer, got {value!r}.") from None


def _splitmix64(value: int) -> int:
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * _MIX_1) & _MASK
    z = ((z ^ (z >> 27)) * _MIX_2) & _MASK
    return z ^ (z >> 31)


@checked
def splitmix64(value: Tensor) -> Tensor:
    """Return one round of SplitMix64 of each int64, which wraps as an unsigned one does.

    Args:
        value: int64, of any shape.

    Example:
        >>> import torch
        >>> from funcrl import rng
        >>> len(rng.splitmix64(torch.arange(5)).unique())
        5
    """
    checks.check_dtype("splitmix64", "value", value, torch.int64)
    z = value + _signed(_GOLDEN)
    z = (z ^ _shift_right(z, 30)) * _signed(_MIX_1)
    z = (z ^ _shift_right(z, 27)) * _signed(_MIX_2)
    return z ^ _shift_right(z, 31)


def _shift_right(value: Tensor, bits: int) -> Tensor:
    """Return `value` shifted with zeros from the left; `>>` alone would repeat the sign."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64)
