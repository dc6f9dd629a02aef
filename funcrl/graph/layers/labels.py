"""What each node of a graph is for, so that a graph can be cut where a layer begins and ends."""

import operator
import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import fx
from torch.fx import Node

from funcrl.graph.aliases import is_view, writes
from funcrl.graph.remat.phases import find_seeds, has_flops, layer_of_path

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
    """What a node is for; the nodes of one label can be compiled together."""

    turn: int  # of the micro-batch
    phase: str
    layer: str  # "" for what is in no layer


def find_labels(graph: fx.Graph) -> dict[Node, Label]:
    """Return the label of every node of a step's graph but those that are made where they are read.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.layers.labels import find_labels
        >>> graph = funcrl.trace(torch.nn.Sequential(torch.nn.ReLU()), torch.ones(2)).graph
        >>> find_labels(graph)
        {relu: Label(turn=0, phase='forward', layer='0')}
    """
    labels: dict[Node, Label] = {}
    seeds = find_seeds(graph)
    turns = _turns(graph, seeds)
    turn, phase = 0, "forward"
    for node in graph.nodes:
        if node in turns:
            turn, phase = turn + 1, "forward"
        elif node in seeds:
            phase = "backward"
        if node.op != "call_function" or is_free(node):
            continue
        if is_gathering(node):
            labels[node] = Label(turn, GATHERED, "")
        elif node.target is operator.getitem:  # one of an operation's results
            labels[node] = labels[node.all_input_nodes[0]]
        elif phase == "backward" and node.meta.get("phase") != "backward":
            labels[node] = _label_by_inputs(node, turn, labels)
        else:
            labels[node] = Label(turn, phase, _own_layer(node, labels))
    return labels


def _turns(graph: fx.Graph, seeds: set[Node]) -> set[Node]:
    """Return the nodes with which the next micro-batch's forward pass begins.

    Such as a parameter's cast; there is a product after it. An optimizer has none.
    """
    turns: set[Node] = set()
    backward, start = False, None
    for node in graph.nodes:
        if node in seeds:
            backward, start = True, None
        elif backward and node.meta.get("phase") == "forward" and node.meta.get("module"):
            start = start or node
            if has_flops(node):
                turns.add(start)
                backward = False
    return turns


def _label_by_inputs(node: Node, turn: int, labels: Mapping[Node, Label]) -> Label:
    """Return the label of what comes after a backward pass, such as an optimizer.

    What one layer alone reads belongs to it. What only a gradient is read for, such as its norm,
    is best computed where the gradient is.
    """
    reads = [behind(read) for read in node.all_input_nodes]
    if len(reads) == 1 and reads[0] in labels and labels[reads[0]].phase == "backward":
        return labels[reads[0]]
    layers = {labels[read].layer if read in labels else _path_layer(read) for read in reads} - {""}
    alone = layers.pop() if len(layers) == 1 else ""  # a learning rate is of no layer
    module = node.meta.get("module")
    return Label(turn, "optimizer", alone if module is None else layer_of_path(module))


def _own_layer(node: Node, labels: Mapping[Node, Label]) -> str:
    """Return the layer of a node of a forward or backward pass.

    No module is known to have added gradients up: they are of the layer that they all come from.
    """
    if node.meta.get("module") is not None:
        return layer_of_path(node.meta["module"])
    reads = [behind(read) for read in node.all_input_nodes]
    layers = {labels[read].layer for read in reads if read in labels}
    return layers.pop() if len(layers) == 1 else ""


def _path_layer(node: Node) -> str:
    """Return the layer of an input, by the end of its path: `0.opt_state.1.mu.blocks.3.mlp...`"""
    found = re.search(r"(?:^|\.)([A-Za-z_]\w*\.\d+)\.[A-Za-z_]", str(node.meta.get("path", "")))
    return found[1] if found else ""


def is_gathering(node: Node) -> bool:
    """Whether a node puts many single numbers, or one a sample, into a list.

    A compiler makes a kernel for each of them; torch's own operation needs one for a hundred.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.layers.labels import is_gathering
        >>> numbers = [torch.tensor(1.0) for _ in range(10)]
        >>> graph = funcrl.trace(lambda numbers: torch.stack(numbers).sum(), numbers).graph
        >>> [node.name for node in graph.nodes if is_gathering(node)]
        ['stack']
    """
    if node.target is not torch.ops.aten.stack.default or len(node.all_input_nodes) <= _MANY:
        return False
    return all(read.meta["val"].ndim <= 1 for read in node.all_input_nodes)


def is_free(node: Node) -> bool:
    """Whether a node is made where it is read: a view, a constant, or a cast to a wider dtype.

    The whole of a split is not read, its parts are. What is handed to the caller is made once.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.layers.labels import is_free
        >>> graph = funcrl.trace(lambda x: x.t().double() + 1, torch.ones(2, 3)).graph
        >>> [is_free(node) for node in graph.nodes]  # x, t, double, + 1, output
        [False, True, True, False, False]
    """
    if node.target is operator.getitem:
        return is_free(node.all_input_nodes[0])
    return is_view(node) or _is_constant(node) or (_widens(node) and _can_wait(node))


def _is_constant(node: Node) -> bool:
    """Whether a node fills a tensor without reading any, and nothing writes into it."""
    return node.target in _CONSTANTS and not any(writes(reader) for reader in _readers(node))


def _can_wait(node: Node) -> bool:
    """Whether a cast has the same value wherever it is read, none of which is by the caller.

    What it is a cast of may be written into before it is read.
    """
    readers = _readers(node)
    written = [user for user in _readers(behind(node.all_input_nodes[0])) if writes(user)]
    return not any(r.op == "output" or any(write < r for write in written) for r in readers)


def _readers(node: Node) -> list[Node]:
    """Return the nodes that read a node or a view of it."""
    readers: list[Node] = []
    for user in node.users:
        readers += _readers(user) if is_view(user) else [user]
    return readers


def _widens(node: Node) -> bool:
    """Whether a node is a cast to a wider floating-point dtype, on the same device."""
    if node.target is not torch.ops.aten._to_copy.default or set(node.kwargs) != {"dtype"}:
        return False
    (source,) = (read.meta["val"].dtype for read in node.all_input_nodes)
    result = node.meta["val"].dtype
    return source.is_floating_point and torch.promote_types(source, result) == result != source


def behind(node: Node) -> Node:
    """Return the node that a chain of nodes that are made where they are read starts from.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.layers.labels import behind
        >>> graph = funcrl.trace(lambda x: x.t().double() + 1, torch.ones(2, 3)).graph
        >>> behind(list(graph.nodes)[2]).name
        'arg0_1'
    """
    while is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
