"""Which samples under way begin with the same pages of a cache."""

from typing import NamedTuple

from torch import Tensor


class Sharing(NamedTuple):
    """The groups of N samples; a group's samples have their first pages in common."""

    members: Tensor  # [groups, most] int32, numbers of samples, -1 for none
    pages: Tensor  # [N] int32, the number of pages that a sample has in common with its group
