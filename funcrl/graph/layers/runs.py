"""The order in which a graph's nodes run: those of one label one after the other."""

from collections.abc import Mapping
from heapq import heappop, heappush

from torch.fx import Graph, Node

from funcrl.graph.aliases import written_by
from funcrl.graph.layers.labels import Label, source_of


def runs_of(graph: Graph, labels: Mapping[Node, Label]) -> list[list[Node]]:
    """Return the labelled nodes in runs of one label, in an order with few runs.

    The first node that can run chooses the label, and all that can run of that label follow.
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
    """Return the nodes that must run before each node: its inputs, and readers of its target.

    What is read through a view after it was written into waits for the writing.
    """
    readers: dict[Node, list[Node]] = {}
    written: dict[Node, Node] = {}
    waits: dict[Node, set[Node]] = {}
    for node in labels:
        reads = [source_of(read) for read in node.all_input_nodes]
        waits[node] = {read for read in reads if read in labels}
        waits[node].update(written[read] for read in reads if read in written)
        for target in map(source_of, written_by(node)):
            waits[node].update(readers.get(target, ()))
            written[target] = node
        for read in reads:
            readers.setdefault(read, []).append(node)
    return waits
