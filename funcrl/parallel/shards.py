"""Leaves of which each rank holds some rows: how they are cut, put together and summed.

A leaf is cut along its first dimension into as many rows for each rank, the last ones padded with
zeros; a scalar is the first rank's, and zero on the others. So each number is on one rank, and a
sum over all leaves and ranks counts it once. Shards are plain tensors with as many dimensions as
their leaf; what they are shards of, the whole shapes by name, is a value of its own, the layout.
"""

from collections.abc import Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcrl.core import tree
from funcrl.core.arguments import TensorTree, checked
from funcrl.core.numerics import at_least_float32
from funcrl.core.types import Params, Tree
from funcrl.parallel.collectives import all_gather, psum_scatter
from funcrl.parallel.mesh import Axis

Layout: TypeAlias = Mapping[str, tuple[int, ...]]  # the whole shape of each parameter


@checked
def layout_of(params: Params) -> Layout:
    """Return the layout of parameters that are whole.

    Example:
        >>> import torch, funcrl
        >>> funcrl.parallel.layout_of({"w": torch.ones(5, 2)})
        {'w': (5, 2)}
    """
    return {name: tuple(leaf.shape) for name, leaf in params.items()}


@checked
def shard(values: TensorTree, axis: Axis) -> Tree:
    """Return this rank's rows of each leaf.

    Example:
        >>> import torch, funcrl
        >>> second = funcrl.parallel.Axis(size=2, rank=1)
        >>> funcrl.parallel.shard({"w": torch.tensor([1.0, 2.0, 3.0])}, second)
        {'w': tensor([3., 0.])}
    """
    return values if axis.size == 1 else tree.map(lambda leaf: _own(leaf, axis), values)


@checked
def unshard(shards: Params, layout: Layout, axis: Axis) -> Params:
    """Return the whole parameters of the shards of all ranks of an axis.

    Its derivative is the sum over ranks of the gradients, of which each rank gets its rows.

    Example:
        >>> import torch, funcrl
        >>> mesh, params = funcrl.parallel.Mesh(), {"w": torch.tensor([1.0, 2.0])}
        >>> funcrl.parallel.unshard(params, funcrl.parallel.layout_of(params), mesh.shard)
        {'w': tensor([1., 2.])}
    """
    if axis.size == 1:
        return shards
    if shards.keys() != layout.keys():
        unknown = sorted(shards.keys() ^ layout.keys())
        raise ValueError(f"unshard expects a layout of the same parameters, got {unknown} in one.")
    return {name: _whole(leaf, layout[name], axis) for name, leaf in shards.items()}


@checked
def psum_scatter_tree(values: TensorTree, axis: Axis) -> Tree:
    """Return this rank's rows of the sum of each leaf over an axis, in at least float32.

    Example:
        >>> import torch, funcrl
        >>> mesh = funcrl.parallel.Mesh()
        >>> funcrl.parallel.psum_scatter_tree({"w": torch.tensor([1.0, 2.0])}, mesh.shard)
        {'w': tensor([1., 2.])}
    """
    if axis.size == 1:
        return values

    def of_leaf(leaf: Tensor) -> Tensor:
        own = psum_scatter(_padded(leaf.to(at_least_float32(leaf.dtype)), axis), axis)
        return (own.squeeze(0) if leaf.ndim == 0 else own).to(leaf.dtype)

    return tree.map(of_leaf, values)


@checked
def global_norm(values: TensorTree, axis: Axis) -> Tensor:
    """Return the Euclidean norm of all leaves, of which each rank of an axis has its rows.

    Example:
        >>> import torch, funcrl
        >>> values = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
        >>> funcrl.parallel.global_norm(values, funcrl.parallel.Mesh().shard)
        tensor(5.)
    """
    norm = tree.global_norm(values)
    return norm if axis.size == 1 else tree.leaf_norm(all_gather(norm[None], axis))


@checked
def whole_leaf(leaf: Tensor, shape: tuple[int, ...], axis: Axis) -> Tensor:
    """Return a leaf of a whole shape, of which this is the shard; one of that shape is it already.

    Example:
        >>> import torch, funcrl
        >>> funcrl.parallel.whole_leaf(torch.ones(2), (2,), funcrl.parallel.Mesh().shard)
        tensor([1., 1.])
    """
    return leaf if leaf.shape == shape else _whole(leaf, shape, axis)


def _whole(leaf: Tensor, shape: tuple[int, ...], axis: Axis) -> Tensor:
    if not shape:
        return all_gather(leaf[None], axis)[0]
    return all_gather(leaf, axis)[: shape[0]]


def _padded(leaf: Tensor, axis: Axis) -> Tensor:
    """Return a leaf with as many rows for each rank."""
    rows = leaf[None] if leaf.ndim == 0 else leaf
    missing = -len(rows) % axis.size
    return pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)) if missing else rows


def _own(leaf: Tensor, axis: Axis) -> Tensor:
    padded = _padded(leaf, axis)
    size = len(padded) // axis.size
    own = padded[axis.rank * size : (axis.rank + 1) * size]
    # A copy, which does not keep the whole leaf alive.
    return (own.squeeze(0) if leaf.ndim == 0 else own).clone(memory_format=torch.contiguous_format)
