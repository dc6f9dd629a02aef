"""Rows of a batch: their number, parts of them, and a function of one mapped over all."""

import re
from collections.abc import Callable, Iterator
from typing import Any

from torch.func import vmap

from funcrl.core import checks, tree
from funcrl.core.arguments import TensorTree, checked
from funcrl.core.types import Params, Tree

# torch's messages where `vmap` cannot run an operator, and where an operator writes values with a
# batch axis in place into a tensor without one.
_NO_BATCHING_RULE = re.compile(r"Batching rule not implemented for (\w+::\w+)")
_NO_BATCH_AXIS = re.compile(r"output with shape .* doesn't match the broadcast shape")


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
            if found := _NO_BATCHING_RULE.search(str(error)):
                raise NotImplementedError(
                    f"{function} expects a model of operators that torch.vmap can run for all rows "
                    f"at once, got {found[1]}, for which it has no batching rule; use other ones."
                ) from error
            if _NO_BATCH_AXIS.search(str(error)):
                raise NotImplementedError(
                    f"{function} expects a model that torch.vmap can run for all rows at once, got "
                    f"an operation in place ({error}): it writes values of all rows into a tensor "
                    f"of none; make that from the input, as a recurrent module's first state by "
                    f"torch.zeros_like(x[0]), or do not write in place."
                ) from error
            raise

    return rows
