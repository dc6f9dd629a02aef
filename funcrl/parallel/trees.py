"""Sums of whole trees over ranks."""

from collections.abc import Iterator

import torch
from torch import Tensor

from funcrl.core import tree
from funcrl.core.arguments import TensorTree, checked
from funcrl.core.numerics import at_least_float32, pairwise_sum
from funcrl.core.types import Tree
from funcrl.parallel.collectives import all_gather, broadcast, psum
from funcrl.parallel.mesh import Axis

_BUCKET = 64 << 20  # bytes that are summed at once: small leaves together, large ones alone


@checked
def psum_tree(values: TensorTree, axis: Axis) -> Tree:
    """Return the sum of each leaf over the ranks of an axis, in at least float32.

    Leaves of a dtype are summed together, up to 64 MB at a time.

    Example:
        >>> import torch, funcrl
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.parallel.psum_tree({"w": torch.tensor([1.0, 2.0])}, mesh.all)
        {'w': tensor([1., 2.])}
    """
    if axis.size == 1:
        return values
    leaves, unflatten = tree.flatten(values)
    summed: dict[int, Tensor] = {}
    for places in _buckets(leaves):
        wide = at_least_float32(leaves[places[0]].dtype)
        flat = torch.cat([leaves[place].reshape(-1).to(wide) for place in places])
        sizes = [leaves[place].numel() for place in places]
        for place, part in zip(places, psum(flat, axis).split(sizes), strict=True):
            leaf = leaves[place]
            # A copy of its own, so that no leaf keeps its bucket alive.
            summed[place] = part.view(leaf.shape).to(leaf.dtype, copy=True)
    return unflatten([summed[place] for place in range(len(leaves))])


@checked
def pairwise_psum_tree(values: TensorTree, axis: Axis) -> Tree:
    """Return the sum of each leaf over the ranks of an axis, in a fixed order, whatever sends them.

    The leaves of all ranks are gathered and summed in pairs: neighbours, then neighbouring sums.

    Example:
        >>> import torch, funcrl
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.parallel.pairwise_psum_tree({"w": torch.tensor([1.0, 2.0])}, mesh.all)
        {'w': tensor([1., 2.])}
    """
    if axis.size == 1:
        return values
    return tree.map(lambda leaf: pairwise_sum(all_gather(leaf[None], axis).unbind()), values)


@checked
def broadcast_tree(values: TensorTree, axis: Axis) -> Tree:
    """Return the leaves of the first rank of an axis; those of others say shapes and dtypes.

    Example:
        >>> import torch, funcrl
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.parallel.broadcast_tree({"w": torch.tensor([1.0, 2.0])}, mesh.all)
        {'w': tensor([1., 2.])}
    """
    return tree.map(lambda leaf: broadcast(leaf, axis), values)


def _buckets(leaves: list[Tensor]) -> Iterator[list[int]]:
    """Yield places of leaves of one dtype, together of no more than a bucket if there are two."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for place, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(place)
    for places in by_dtype.values():
        bucket: list[int] = []
        size = 0
        for place in places:
            if bucket and size + leaves[place].nbytes > _BUCKET:
                yield bucket
                bucket, size = [], 0
            bucket.append(place)
            size += leaves[place].nbytes
        yield bucket
