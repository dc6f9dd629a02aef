"""Rewrites that every traced graph gets: nothing in place, nothing unused, no view made twice."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from funcrl.graph.aliases import is_view, looks_alike
from funcrl.graph.in_place import without_writes
from funcrl.graph.nodes import origin_of

aten = torch.ops.aten


def clean(module: GraphModule) -> GraphModule:
    """Return the traced graph without in-place operations, dead nodes and needless views.

    A copy into an input stays: it is what the function does to its arguments. A view is not kept
    from one micro-batch to the next, with what it looks at.
    """
    module = without_writes(module)
    views: dict[tuple[Any, str, int], Node] = {}
    for node in module.graph.nodes:
        if is_view(node):
            key = (node.target, f"{node.args} {node.kwargs}", origin_of(node).microbatch)
            first = views.setdefault(key, node)
            (source,) = node.all_input_nodes
            node.replace_all_uses_with(source if _same(node, source) else first)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def look_through(node: Node) -> Node:
    """Return the node that a chain of views and casts starts from."""
    while (is_view(node) or node.target is aten._to_copy.default) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _same(node: Node, source: Node) -> bool:
    """Return whether a view has the shape, strides and dtype of its source."""
    new, old = node.meta.get("val"), source.meta.get("val")
    return isinstance(new, Tensor) and isinstance(old, Tensor) and looks_alike(new, old)
