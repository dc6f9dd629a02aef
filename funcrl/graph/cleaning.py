"""Rewrites that every traced graph gets: nothing in place, nothing unused, no view twice."""

from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from funcrl.graph.aliases import is_view, looks_alike
from funcrl.graph.in_place import without_writes

aten = torch.ops.aten


def clean(module: GraphModule) -> GraphModule:
    """Return the traced graph without in-place operations, dead nodes and needless views.

    A copy into an input stays: it is what the function does to its arguments.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from funcrl.graph.cleaning import clean
        >>> graph = make_fx(lambda x: (x.view(2) * 2).add_(1))(torch.ones(2))
        >>> [node.name for node in clean(graph).graph.nodes]
        ['x_1', 'mul', 'add_', 'output']
    """
    module = without_writes(module)
    views: dict[tuple[Any, str], Node] = {}
    for node in module.graph.nodes:
        if is_view(node):
            first = views.setdefault((node.target, f"{node.args} {node.kwargs}"), node)
            (source,) = node.all_input_nodes
            node.replace_all_uses_with(source if _same(node, source) else first)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def look_through(node: Node) -> Node:
    """Return the node that a chain of views and casts starts from.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from funcrl.graph.cleaning import look_through
        >>> graph = make_fx(lambda x: x.t().double() + 1)(torch.ones(2, 3)).graph
        >>> look_through(list(graph.nodes)[2]).name
        'x_1'
    """
    while (is_view(node) or node.target is aten._to_copy.default) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _same(node: Node, source: Node) -> bool:
    """Whether a view looks at its source as the source itself does."""
    new, old = node.meta.get("val"), source.meta.get("val")
    return isinstance(new, Tensor) and isinstance(old, Tensor) and looks_alike(new, old)
