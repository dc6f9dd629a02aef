"""The order of a graph's nodes, which is when memory is taken and given back."""

from collections.abc import Container, Mapping
from heapq import heappop, heappush

from torch.fx import Graph, Node

from funcrl.graph.aliases import written_by
from funcrl.graph.layers.labels import Label, behind


def hoist(graph: Graph, nodes: Container[Node]) -> None:
    """Move each of the nodes to directly after the last of its inputs.

    Args:
        graph: is changed.
        nodes: which ones.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.remat.scheduling import hoist
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


def runs_of(graph: Graph, labels: Mapping[Node, Label]) -> list[list[Node]]:
    """Return the labelled nodes in an order of few changes of label, one run for each.

    The first node that can run chooses the label, and all that can run of that label follow.

    Args:
        graph: is not changed.
        labels: from `funcrl.graph.layers.labels.find_labels`.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.layers.labels import find_labels
        >>> from funcrl.graph.remat.scheduling import runs_of
        >>> graph = funcrl.trace(lambda x: x.sin().cos(), torch.ones(2)).graph
        >>> runs_of(graph, find_labels(graph))
        [[sin, cos]]
    """
    waits = _waits(labels)
    followers: dict[Node, list[Node]] = {node: [] for node in labels}
    for node, sources in waits.items():
        for source in sources:
            followers[source].append(node)
    nodes = _in_turn(graph, waits, followers)
    place = {node: number for number, node in enumerate(nodes)}
    missing = {node: len(sources) for node, sources in waits.items()}
    ready: dict[Label, list[int]] = {label: [] for label in labels.values()}
    for node, count in missing.items():
        if not count:
            heappush(ready[labels[node]], place[node])
    runs: list[list[Node]] = []
    while any(ready.values()):
        label = min((places[0], label) for label, places in ready.items() if places)[1]
        run = []
        while ready[label]:
            node = nodes[heappop(ready[label])]
            run.append(node)
            for follower in followers[node]:
                missing[follower] -= 1
                if not missing[follower]:
                    heappush(ready[labels[follower]], place[follower])
        runs.append(run)
    return runs


def _in_turn(
    graph: Graph, waits: Mapping[Node, set[Node]], followers: Mapping[Node, list[Node]]
) -> list[Node]:
    """Return the nodes in order, those that wait for nothing, as a cast, before a first reader."""
    place = {node: number for number, node in enumerate(graph.nodes)}

    def turn(node: Node) -> tuple[int, int]:
        first = min((place[reader] for reader in followers[node]), default=place[node])
        return (place[node], 1) if waits[node] else (first, 0)

    return sorted(waits, key=turn)


def _waits(labels: Mapping[Node, Label]) -> dict[Node, set[Node]]:
    """Return what each node waits for: what it reads, and, to write, those that read before.

    What is read through a view after it was written into waits for the writing.
    """
    readers: dict[Node, list[Node]] = {}
    written: dict[Node, Node] = {}
    waits: dict[Node, set[Node]] = {}
    for node in labels:
        reads = [behind(read) for read in node.all_input_nodes]
        waits[node] = {read for read in reads if read in labels}
        waits[node].update(written[read] for read in reads if read in written)
        for target in map(behind, written_by(node)):
            waits[node].update(readers.get(target, ()))
            written[target] = node
        for read in reads:
            readers.setdefault(read, []).append(node)
    return waits
