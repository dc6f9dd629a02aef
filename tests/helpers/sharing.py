"""Random samples under way on a cache of pages, some of which begin with the same pages."""

from typing import NamedTuple

import torch
from torch import Tensor

from funcrl.ops.exact.paged import Sharing


class UnderWay(NamedTuple):
    """N samples and what they add to a cache; the number of a group's samples is the same."""

    q: Tensor  # [N, H, C]
    k: Tensor  # [N, K, C]
    v: Tensor  # [N, K, C]
    cache: Tensor  # [pages, K, size, 2C], NaN where nothing is written yet
    tables: Tensor  # [N, W]
    last: Tensor  # [N]
    sharing: Sharing


def samples_under_way(
    dtype: torch.dtype, heads: int, key_heads: int, width: int, group: int, groups: int, size: int,
    seed: int, device: str = "cpu",
) -> UnderWay:  # fmt: skip
    """Return samples of prompts of up to three pages, in any order, at any place."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    count, pages = group * groups, 6
    tables = torch.zeros(count, pages, dtype=torch.int64)
    last = torch.zeros(count, dtype=torch.int64)
    shared = torch.zeros(count, dtype=torch.int32)
    members = torch.randperm(count, generator=generator).view(groups, group)
    used = 1
    for row in members.tolist():
        prompt = integer(1, 3 * size + 2)
        common = list(range(used, used + prompt // size))
        used += len(common)
        for sample in row:
            own = pages - len(common)
            tables[sample] = torch.tensor([*common, *range(used, used + own)])
            used += own
            shared[sample] = len(common)
            last[sample] = integer(prompt, pages * size)
    cache = torch.randn(used, key_heads, size, 2 * width, generator=generator)
    for sample in range(count):
        page, place = divmod(int(last[sample]), size)
        cache[tables[sample, page], :, place:] = float("nan")
        cache[tables[sample, page + 1 :]] = float("nan")
    q = torch.randn(count, heads, width, generator=generator) * 2
    k, v = (torch.randn(count, key_heads, width, generator=generator) for _ in range(2))
    half = (part.to(device, dtype) for part in (q, k, v, cache))
    sharing = Sharing(members.to(device, torch.int32), shared.to(device))
    return UnderWay(*half, tables.to(device), last.to(device), sharing)


def with_new(case: UnderWay) -> Tensor:
    """Return the cache after the new keys and values are written, one sample after the other."""
    cache = case.cache.clone()
    size, width = cache.shape[2], case.k.shape[-1]
    for sample, end in enumerate(case.last.tolist()):
        if end < 0:
            continue
        page = case.tables[sample, end // size]
        cache[page, :, end % size, :width] = case.k[sample]
        cache[page, :, end % size, width:] = case.v[sample]
    return cache
