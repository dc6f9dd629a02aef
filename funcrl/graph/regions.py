"""A graph cut into pieces, so that what repeats (a layer) is compiled once.

A step of 28 layers holds 28 times the same forward pass, backward pass and update. A compiler that
is given all of it at once sees 28 different programs. Here the graph becomes calls of pieces, and
pieces that are equal but for their tensors become one module.
"""

import operator
from collections import Counter
from collections.abc import Mapping
from heapq import heappop, heappush
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from funcrl.graph.cleaning import writes
from funcrl.graph.labels import Label, behind, find_labels, is_free
from funcrl.graph.phases import draws


class _Piece(NamedTuple):
    """A run of nodes, with all that it reads and all that is read of it."""

    nodes: list[Node]  # in order, with those that are made where they are read
    inputs: list[Node]
    outputs: list[Node]


def split_repeated(module: GraphModule) -> GraphModule:
    """Return the graph as calls of submodules, of which repeated layers share one.

    The nodes are put into an order in which those of one layer and phase stand together; what does
    not repeat stays in one piece with its neighbours. The same operations run on the same values:
    every bit is kept. A graph that draws random numbers, whose order matters, or that has no
    repeated layers, becomes one piece.

    Args:
        module: a flat graph from `funcrl.trace`, after all other passes; it is not changed.

    Example:
        >>> import torch, funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=7))
        >>> loss_fn = lambda params, sample: funcrl.logprob_fn(model)(params, sample).logprobs.sum()
        >>> sample = funcrl.types.Sample(torch.tensor([1, 2, 3]), torch.arange(3))
        >>> params = funcrl.init_params(model, seed=0)
        >>> graph = funcrl.trace(torch.func.grad(loss_fn), params, sample)
        >>> pieces = funcrl.graph.split_repeated(graph)
        >>> torch.equal(pieces(params, sample)["norm.weight"], graph(params, sample)["norm.weight"])
        True
    """
    labels = find_labels(module.graph)
    runs = [list(labels)] if labels else []
    if not any(draws(node) for node in labels):
        merged = _merged(module.graph, _runs(module.graph, labels))
        runs = merged if len(merged) > 1 else runs  # one piece keeps the order that it had
    return _assembled(module, _pieces(module.graph, runs))


# -- order ------------------------------------------------------------------------------------


def _runs(graph: fx.Graph, labels: Mapping[Node, Label]) -> list[list[Node]]:
    """Return the labelled nodes in an order of few changes of label, one run for each.

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
    graph: fx.Graph, waits: Mapping[Node, set[Node]], followers: Mapping[Node, list[Node]]
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
        if writes(node):
            target = behind(node.all_input_nodes[0])
            waits[node].update(readers.get(target, ()))
            written[target] = node
        for read in reads:
            readers.setdefault(read, []).append(node)
    return waits


def _merged(graph: fx.Graph, runs: list[list[Node]]) -> list[list[Node]]:
    """Return the runs, neighbours as one where neither is like any other run."""
    forms = [_form(piece) for piece in _pieces(graph, runs)]
    counts = Counter(forms)
    merged: list[list[Node]] = []
    for number, run in enumerate(runs):
        if number and counts[forms[number]] == counts[forms[number - 1]] == 1:
            merged[-1] += run
        else:
            merged.append(list(run))
    return merged


# -- pieces -----------------------------------------------------------------------------------


def _pieces(graph: fx.Graph, runs: list[list[Node]]) -> list[_Piece]:
    place = {node: number for number, run in enumerate(runs) for node in run}
    results = {behind(node) for node in graph.output_node().all_input_nodes}
    pieces = []
    for number, run in enumerate(runs):
        nodes: dict[Node, None] = {}
        inputs: dict[Node, None] = {}
        for node in run:
            for read in node.all_input_nodes:
                _add_read(read, nodes, inputs, place, number)
            nodes[node] = None
        outputs = [
            node
            for node in run
            if not writes(node)
            and (node in results or any(place[user] != number for user in _users(node)))
        ]
        pieces.append(_Piece(list(nodes), list(inputs), outputs))
    return pieces


def _add_read(
    node: Node, nodes: dict[Node, None], inputs: dict[Node, None], place: dict[Node, int], here: int
) -> None:
    """Add what a node of this piece reads: made here if it is free, and else an input."""
    if is_free(node):
        for source in node.all_input_nodes:
            _add_read(source, nodes, inputs, place, here)
        nodes[node] = None
    elif place.get(node) != here:
        inputs[node] = None


def _users(node: Node) -> list[Node]:
    """Return the nodes that read a node, through those that are made where they are read."""
    users = []
    for user in node.users:
        if is_free(user):
            users += _users(user)
        elif user.op == "call_function":
            users.append(user)
    return users


def _form(piece: _Piece) -> str:
    """Return the piece in words that are the same for equal pieces."""
    names = {node: f"%{number}" for number, node in enumerate([*piece.inputs, *piece.nodes])}
    lines = [_described(node.meta.get("val")) for node in piece.inputs]
    for node in piece.nodes:
        lines.append(f"{node.target} {_text(node.args, names)} {_text(node.kwargs, names)}")
    return "\n".join([*lines, str([names[node] for node in piece.outputs])])


def _text(value: Any, names: Mapping[Node, str]) -> str:
    if isinstance(value, Node):
        return names[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(item, names) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_text(item, names)}' for key, item in value.items())}}}"
    return repr(value)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return repr(value)
    return f"{list(value.shape)} {value.stride()} {value.dtype} {value.device}"


def _assembled(module: GraphModule, pieces: list[_Piece]) -> GraphModule:
    """Return the graph of calls; equal pieces are one submodule."""
    graph = fx.Graph()
    graph.set_codegen(module.graph._codegen)
    made: dict[Node, Node] = {}
    owned: dict[str, Any] = {}  # by the graph: constants and pieces
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            made[node] = graph.node_copy(node, made.__getitem__)
        if node.op == "get_attr":
            owned[str(node.target)] = operator.attrgetter(str(node.target))(module)
    names: dict[str, str] = {}
    for piece in pieces:
        form = _form(piece)
        if form not in names:
            names[form] = f"piece_{len(names)}"
            owned[names[form]] = _submodule(module, piece)
        call = graph.call_module(names[form], tuple(made[node] for node in piece.inputs))
        for index, node in enumerate(piece.outputs):
            made[node] = graph.call_function(operator.getitem, (call, index))
        for node in piece.nodes:
            if writes(node):
                made[node] = made[behind(node.all_input_nodes[0])]
    output = module.graph.output_node()
    for node in output.all_input_nodes:
        _copy_free(graph, node, made)
    graph.output(map_arg(output.args[0], made.__getitem__))
    return GraphModule(owned, graph)


def _copy_free(graph: fx.Graph, node: Node, made: dict[Node, Node]) -> None:
    if node not in made:
        for read in node.all_input_nodes:
            _copy_free(graph, read, made)
        made[node] = graph.node_copy(node, made.__getitem__)


def _submodule(module: GraphModule, piece: _Piece) -> GraphModule:
    graph = fx.Graph()
    made: dict[Node, Node] = {}
    for number, node in enumerate(piece.inputs):
        made[node] = graph.placeholder(f"input_{number}")
        made[node].meta["val"] = node.meta.get("val")
    for node in piece.nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    graph.output(tuple(made[node] for node in piece.outputs))
    graph.lint()
    return GraphModule(module, graph)
