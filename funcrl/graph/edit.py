"""What every pass needs to rewrite a graph."""

from collections.abc import Callable, Container, Iterable
from functools import reduce
from typing import Any

import torch
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from funcrl.graph.nodes import Phase, origin_of, set_origin

aten = torch.ops.aten
_PHASES: tuple[Phase, ...] = ("optimizer", "backward", "forward")  # the latest first


def copied(graph: Graph) -> Graph:
    """Return a copy to rewrite, which takes and returns the same trees."""
    new = Graph()
    result = new.graph_copy(graph, {})
    new.output(result).meta = dict(graph.output_node().meta)
    new.set_codegen(graph._codegen)
    return new


def as_module(graph: Graph, owner: GraphModule) -> GraphModule:
    """Return a checked graph as a module with what its owner holds, such as constants.

    Its code is written when it is first run or read: passes follow one another, and nobody needs
    the code of those in between.
    """
    graph.lint()
    module = _LazyGraphModule(owner, graph)
    module.meta.update(owner.meta)
    return module


def nodes_after(node: Node) -> list[Node]:
    """Return the nodes of a graph that stand after one of them, or all of them after its root."""
    found: list[Node] = []
    while (node := node.next).op != "root":
        found.append(node)
    return found


def arguments(node: Node) -> tuple[Any, ...]:
    """Return a node's arguments, without torch's union type of them."""
    return node.args


def example_of(operation: Callable[..., Any], args: Any, kwargs: Any, like: Node) -> Any:
    """Return an operation's result for nodes, without data, as those of the trace of `like` are."""
    mode: Any = detect_fake_mode(like.meta["val"])
    with mode:
        values, options = map_arg((args, kwargs), lambda node: node.meta["val"])
        return operation(*values, **options)


def hoist(graph: Graph, nodes: Container[Node]) -> None:
    """Move each of the nodes to directly after the last of its inputs."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    position: dict[Node, tuple[int, int]] = {}
    anchor: dict[Node, Node] = {}  # of a moved node: the unmoved one that it follows
    last: dict[Node, Node] = {}  # of an anchor: the last node that was moved after it
    for index, node in enumerate(list(graph.nodes)):
        position[node] = (len(inputs) - 1 if node.op == "placeholder" else index, 0)
        if node in nodes and inputs:
            latest = max(node.all_input_nodes, key=position.__getitem__, default=inputs[-1])
            latest = inputs[-1] if latest.op == "placeholder" else latest
            anchor[node] = anchor.get(latest, latest)
            last.get(anchor[node], anchor[node]).append(node)
            last[anchor[node]] = node
            position[node] = (position[anchor[node]][0], index)


class Writer:
    """Adds nodes before a place in a graph, with the origin of the node they are made for."""

    def __init__(self, graph: Graph, place: Node, source: Node) -> None:
        self.graph, self.place, self.source = graph, place, source

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Return a new node that computes `op(*args)`."""
        with self.graph.inserting_before(self.place):
            node = self.graph.call_function(op, args, kwargs)
        node.meta["val"] = example_of(op, args, kwargs, like=self.source)
        origin = origin_of(self.source)
        # Gram products of what a forward pass computed are computed in it.
        phases = {origin_of(read).phase for read in node.all_input_nodes}
        phase = next((each for each in _PHASES if each in phases), origin.phase)
        set_origin(node, origin._replace(phase=phase))
        return node

    def sum(self, parts: Iterable[Node]) -> Node:
        """Return the sum of nodes, each of which is added as soon as it is written."""
        return reduce(lambda total, part: self(aten.add.Tensor, total, part), parts)

    def cast(self, node: Node, dtype: torch.dtype) -> Node:
        """Return the node in a dtype."""
        if shape_of(node).dtype == dtype:
            return node
        return self(aten._to_copy.default, node, dtype=dtype)

    def rows(self, node: Node) -> Node:
        """Return [B, T, ...] as [B T, ...]."""
        value = shape_of(node)
        if not value.is_contiguous():
            node = self(aten.clone.default, node, memory_format=torch.contiguous_format)
        return self(aten.view.default, node, [-1, *value.shape[2:]])


def shape_of(node: Node) -> torch.Tensor:
    """Return the tensor without data that says what shape, dtype and device a node has."""
    return node.meta["val"]
