"""Which layer each node of a graph belongs to, in an order in which layers are runs of nodes."""

import operator
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import fx
from torch.fx import Graph, Node

from funcrl.graph.aliases import is_view, writes, written_by
from funcrl.graph.nodes import origin_of

GATHERED = "gathered"  # the phase of a list of many numbers, such as the norms of all leaves
_MANY = 8
_CONSTANTS = {
    torch.ops.aten.zeros.default,
    torch.ops.aten.ones.default,
    torch.ops.aten.full.default,
    torch.ops.aten.scalar_tensor.default,
    torch.ops.aten.arange.default,
    torch.ops.aten.arange.start_step,
}


class Label(NamedTuple):
    """The nodes of one label can be compiled together."""

    microbatch: int
    phase: str
    layer: str


def find_labels(graph: fx.Graph) -> dict[Node, Label]:
    """Return the label of every node of a graph but those that are computed where they are read."""
    labels: dict[Node, Label] = {}
    for node in graph.nodes:
        if node.op == "call_function" and not is_free(node):
            labels[node] = _label(node, labels)
    return labels


def _label(node: Node, labels: Mapping[Node, Label]) -> Label:
    origin = origin_of(node)
    if is_gathering(node):
        return Label(origin.microbatch, GATHERED, "")
    reads = [source_of(read) for read in node.all_input_nodes]
    if len(reads) == 1 and reads[0] in labels:
        alone = labels[reads[0]]
        # What only a gradient is read for, such as its norm, is best computed where that is.
        norm = origin.phase == "optimizer" and alone.phase == "backward"
        if norm or node.target is operator.getitem:
            return alone
    return Label(origin.microbatch, origin.phase, origin.layer)


def is_gathering(node: Node) -> bool:
    """Return whether a node puts many single numbers, or one a sample, into a list.

    A compiler makes a kernel for each of them; torch's own operation needs one for a hundred.
    """
    if node.target is not torch.ops.aten.stack.default or len(node.all_input_nodes) <= _MANY:
        return False
    return all(read.meta["val"].ndim <= 1 for read in node.all_input_nodes)


def is_free(node: Node) -> bool:
    """Return whether a node is computed where it is read: a view, a constant, or a wider dtype.

    The whole of a split is not read, its parts are. What is handed to the caller is made once.
    """
    if node.target is operator.getitem:
        return is_free(node.all_input_nodes[0])
    return is_view(node) or _is_constant(node) or (_widens(node) and _can_wait(node))


def source_of(node: Node) -> Node:
    """Return the node that a chain of nodes that are computed where they are read starts from."""
    while is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _is_constant(node: Node) -> bool:
    """Return whether a node fills a tensor without reading any, and nothing writes into it."""
    return node.target in _CONSTANTS and not any(writes(reader) for reader in _readers(node))


def _can_wait(node: Node) -> bool:
    """Return whether a cast has the same value wherever it is read, none of which is by the caller.

    What it is a cast of may be written into before it is read.
    """
    readers = _readers(node)
    written = [user for user in _readers(source_of(node.all_input_nodes[0])) if writes(user)]
    return not any(r.op == "output" or any(write < r for write in written) for r in readers)


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read a node or a view of it."""
    readers: list[Node] = []
    for user in node.users:
        readers += _readers(user) if is_view(user) else [user]
    return readers


def _widens(node: Node) -> bool:
    """Return whether a node is a cast to a wider floating-point dtype, on the same device."""
    if node.target is not torch.ops.aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    (source,) = (read.meta["val"].dtype for read in node.all_input_nodes)
    result = node.meta["val"].dtype
    return source.is_floating_point and torch.promote_types(source, result) == result != source


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

    def order(node: Node) -> tuple[int, int]:
        first = min((place[reader] for reader in followers[node]), default=place[node])
        return (place[node], 1) if waits[node] else (first, 0)

    return sorted(waits, key=order)


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
