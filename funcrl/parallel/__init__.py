"""Many ranks: a mesh as a value, collectives that are the identity without one, rows of a rank."""

from funcrl.parallel.collectives import (
    all_gather,
    broadcast,
    gather_objects,
    pmax,
    psum,
    psum_scatter,
)
from funcrl.parallel.mesh import Axis, Mesh, make_mesh
from funcrl.parallel.rows import own_rows
from funcrl.parallel.shards import (
    Layout,
    global_norm,
    layout_of,
    psum_scatter_tree,
    shard,
    unshard,
    whole_leaf,
)
from funcrl.parallel.trees import broadcast_tree, pairwise_psum_tree, psum_tree

__all__ = [
    "Axis",
    "Layout",
    "Mesh",
    "all_gather",
    "broadcast",
    "broadcast_tree",
    "gather_objects",
    "global_norm",
    "layout_of",
    "make_mesh",
    "own_rows",
    "pairwise_psum_tree",
    "pmax",
    "psum",
    "psum_scatter",
    "psum_scatter_tree",
    "psum_tree",
    "shard",
    "unshard",
    "whole_leaf",
]
