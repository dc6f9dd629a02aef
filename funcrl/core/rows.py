"""Rows of a batch: their number, parts of them, and a function of one mapped over all."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap

from funcrl.core import checks, tree
from funcrl.core.arguments import TensorTree, checked
from funcrl.core.types import Params, Tree
from funcrl.core.unbatched import explained


@checked
def num_rows(function: str, batch: Tree) -> int:
    """Return B, the length of every leaf's leading axis; errors are in the name of `function`."""
    sizes: dict[str, int] = {}
    for path, leaf in zip(tree.paths(batch), tree.leaves(batch), strict=True):
        name = path or "the batch"
        checks.check_tensor(function, name, leaf)
        if leaf.ndim == 0:
            raise ValueError(f"{function} expects {name} to have a leading axis B, got a scalar.")
        sizes[name] = leaf.shape[0]
    if not sizes or 0 in sizes.values():
        raise ValueError(f"{function} expects at least one row, got an empty batch.")
    if len(set(sizes.values())) > 1:
        raise ValueError(f"{function} expects leaves of one leading axis B, got {sizes}.")
    return next(iter(sizes.values()))


@checked
def split_rows(function: str, batch: Tree, size: int | None) -> Iterator[Tree]:
    """Return consecutive parts of the batch, in order, each of at most `size` rows."""
    rows = num_rows(function, batch)
    size = size or rows
    return (
        tree.map(lambda leaf, start=start: leaf[start : start + size], batch)
        for start in range(0, rows, size)
    )


@checked
def over_rows(
    function: str, fn: Callable[[Params, Any], Any], chunk: int | None = None
) -> Callable[[Params, Tree], Any]:
    """Return `(params, batch) -> fn(params, sample)` of `chunk` rows at a time, by `torch.vmap`.

    An error is in the name of `function`, and names the operator that vmap cannot run.
    """
    mapped = vmap(fn, in_dims=(None, 0), chunk_size=chunk)

    @checked
    def rows(params: TensorTree, batch: Tree) -> Any:
        num_rows(function, batch)
        try:
            return mapped(params, batch)
        except RuntimeError as error:
            if ours := explained(function, error):
                raise ours from error
            raise

    return rows


@checked
def over_groups(
    fn: Callable[[Tensor], Tensor], values: Tensor, group: Tensor, by_vmap: bool
) -> tuple[list[Tensor], Tensor]:
    """Return `fn` of the values of each group, and the order [B] in which these were read.

    Groups of one size go through one call where `fn` can be vmapped: the same bits, sooner.
    """
    order = group.argsort(stable=True)
    sizes = torch.unique_consecutive(group[order], return_counts=True)[1].tolist()
    parts = values[order].split(sizes)
    if by_vmap and len({*sizes}) == 1:
        return [*vmap(fn)(torch.stack(parts))], order
    return [fn(part) for part in parts], order


@checked
def row_ends(mask: Tensor) -> Tensor:
    """Return one past the last True of each row of a mask [B, T]; 0 for a row without any."""
    return (torch.arange(1, mask.shape[1] + 1, device=mask.device) * mask).amax(dim=1)
