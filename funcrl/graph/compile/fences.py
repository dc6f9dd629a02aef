"""Fences, which keep a compiler from computing early what `remat` put late.

What is computed again depends on no gradient, so that a compiler is free to run it beside the first
copy and to keep the result: Inductor does, and merges both into one kernel. A fence before it
claims to write into the kept values that are read, once a gradient is there. It writes nothing.
"""

from collections.abc import Sequence
from itertools import islice, takewhile

import torch
from torch import Tensor, fx

from funcrl.core.arguments import checked
from funcrl.graph.aliases import Storages, find_storages
from funcrl.graph.edit import as_module
from funcrl.graph.nodes import is_late, origin_of, set_origin


@torch.library.custom_op("funcrl::fence", mutates_args=("kept",))
def _fence(kept: Sequence[Tensor], gradient: Tensor) -> None:
    """Do nothing; the claim to write fixes the place in the order."""


@_fence.register_fake
def _(kept: Sequence[Tensor], gradient: Tensor) -> None:
    """Return nothing."""


@checked
def add_fences(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph in which nothing that `remat` computes again can run before its place.

    For Inductor. What runs node by node needs no fence, and a backend that copies instead of
    writing in place (aot_eager) would copy the kept values.

    Args:
        gm: a result of `remat`, after all other passes.

    Example:
        >>> import torch, funcrl
        >>> gm = funcrl.trace(torch.func.grad(lambda x: x.exp().sin().cos().sum()), torch.zeros(3))
        >>> gm = funcrl.remat(gm, lambda node: node.name == "sin")
        >>> [node.name for node in funcrl.graph.add_fences(gm).graph.nodes][4:9]
        ['sum_1', 'ones_like', 'expand', 'fence_default', 'sin_recomputed']
    """
    graph = fx.Graph()
    graph.set_codegen(gm.graph._codegen)
    copies: dict[fx.Node, fx.Node] = {}
    gradient: fx.Node | None = None
    nodes, storages = list(gm.graph.nodes), find_storages(gm)
    wholes = _wholes(nodes, storages)
    gradients = _gradients(gm.graph)
    for place, node in enumerate(nodes):
        if not node.meta.get("recomputed"):
            if node in gradients and isinstance(node.meta.get("val"), Tensor):
                gradient = node
        elif gradient is not None and not nodes[place - 1].meta.get("recomputed"):
            kept = _kept(nodes, place, storages, wholes)
            if kept:
                arguments = ([copies[read] for read in kept], copies[gradient])
                fence = graph.call_function(torch.ops.funcrl.fence.default, arguments)
                fence.meta["val"] = None
                set_origin(fence, origin_of(node))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return as_module(graph, gm)


def _gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return what depends on the seed of a backward pass, or all of it if no seed was recorded."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if origin_of(node).is_seed or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found or {node for node in graph.nodes if is_late(node)}


def _wholes(nodes: list[fx.Node], storages: Storages) -> dict[int, fx.Node]:
    """Return, for each storage, the tensor that was allocated with it."""
    wholes: dict[int, fx.Node] = {}
    for node in nodes:
        if isinstance(node.meta.get("val"), Tensor):
            for storage in storages.of[node]:
                wholes.setdefault(storage, node)
    return wholes


def _kept(
    nodes: list[fx.Node], start: int, storages: Storages, wholes: dict[int, fx.Node]
) -> list[fx.Node]:
    """Return what the run of recomputed nodes reads of the forward pass's own values.

    Of a view the whole that it looks at: a part may have elements that share a place.
    """
    again = takewhile(lambda node: node.meta.get("recomputed"), islice(nodes, start, None))
    reads = {read for node in again for read in node.all_input_nodes}
    found = {
        wholes[storage]
        for read in reads
        if not read.meta.get("recomputed")
        for storage in storages.of[read]
        if storage in wholes
    }
    # The caller's tensors must not be written into, not even by claim.
    return sorted(
        node
        for node in found
        if node.op == "call_function" and not node.meta.get("recomputed") and node < nodes[start]
    )
