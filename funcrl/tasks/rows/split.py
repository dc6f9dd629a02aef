"""Which problems are held out, and the order in which the others are drawn."""

import hashlib
from collections.abc import Sequence
from typing import TypeVar

from funcrl.core import rng

Item = TypeVar("Item")


def hold_out(contents: Sequence[str], share: float) -> list[bool]:
    """Return which problems are held out: the share of those with the lowest hash.

    The hash is of a problem's content alone, so that it does not matter what else there is, in
    which order, or where. Where chance would leave one of the sides empty, it gets the problem
    whose hash is the nearest, unless all are alike.

    Args:
        contents: of each problem; equal ones are on one side.
        share: from 0 to 1.
    """
    hashes = [_hash(each) for each in contents]
    bound = share * 2.0**64
    if 0 < share < 1 and len({*hashes}) > 1:
        bound = max(bound, min(hashes) + 1)
        bound = min(bound, max(hashes))
    return [each < bound for each in hashes]


def epochs(problems: Sequence[Item], seed: int, start: int, count: int) -> list[Item]:
    """Return the problems number start, start + 1, ... of a stream of permutations of them all."""
    orders: dict[int, list[int]] = {}
    chosen = []
    for index in range(start, start + count):
        epoch, place = divmod(index, len(problems))
        if epoch not in orders:
            orders[epoch] = rng.permutation(len(problems), seed, epoch).tolist()
        chosen.append(problems[orders[epoch][place]])
    return chosen


def spread(problems: Sequence[Item], count: int) -> list[Item]:
    """Return `count` problems at pseudo-random places of the sequence, always the same."""
    return [problems[row] for row in rng.permutation(len(problems), 1)[:count].tolist()]


def _hash(content: str) -> int:
    # A lone surrogate, which JSON can hold, is no UTF-8.
    raw = content.encode("utf-8", "surrogatepass")
    return int.from_bytes(hashlib.sha256(raw).digest()[:8], "big")
