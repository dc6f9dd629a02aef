"""The order of a graph's nodes, which is when memory is taken and given back."""

from collections.abc import Container

from torch.fx import Graph, Node


def hoist(graph: Graph, nodes: Container[Node]) -> None:
    """Move each of the nodes to directly after the last of its inputs.

    Args:
        graph: is changed.
        nodes: which ones.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.scheduling import hoist
        >>> graph = funcrl.trace(lambda x: (x.sin(), x.cos(), x.sin().sum()), torch.ones(2)).graph
        >>> hoist(graph, [node for node in graph.nodes if node.name == "cos"])
        >>> [node.name for node in graph.nodes]
        ['arg0_1', 'cos', 'sin', 'sin_1', 'sum_1', 'output']
    """
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    position: dict[Node, tuple[int, int]] = {}
    anchor: dict[Node, Node] = {}  # of a moved node: the unmoved one that it follows
    last: dict[Node, Node] = {}  # of an anchor: the last node that was moved behind it
    for index, node in enumerate(list(graph.nodes)):
        position[node] = (len(inputs) - 1 if node.op == "placeholder" else index, 0)
        if node in nodes and inputs:
            latest = max(node.all_input_nodes, key=position.__getitem__, default=inputs[-1])
            latest = inputs[-1] if latest.op == "placeholder" else latest
            anchor[node] = anchor.get(latest, latest)
            last.get(anchor[node], anchor[node]).append(node)
            last[anchor[node]] = node
            position[node] = (position[anchor[node]][0], index)
