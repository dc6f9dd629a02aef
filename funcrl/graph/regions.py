"""A graph cut into pieces, so that what repeats (a layer) is compiled once.

A step of 28 layers holds 28 times the same forward pass, backward pass and update. A compiler that
is given all of it at once sees 28 different programs. Here the graph becomes calls of pieces, and
pieces that are equal but for their tensors become one module.
"""

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from funcrl.core.arguments import checked
from funcrl.graph.aliases import writes, written_by
from funcrl.graph.nodes import (
    Label,
    draws,
    find_labels,
    is_free,
    is_uncompiled,
    runs_of,
    source_of,
)


class _Piece(NamedTuple):
    """A run of nodes with its inputs and its outputs."""

    nodes: list[Node]  # in order, with those that are made where they are read
    inputs: list[Node]
    outputs: list[Node]


@checked
def split_repeated(module: GraphModule) -> GraphModule:
    """Return the graph as calls of submodules, of which repeated layers share one.

    The nodes are put into an order in which those of one layer and phase stand together; what does
    not repeat stays in one piece with its neighbours. The same operations run on the same values:
    every bit is kept. Where an optimizer looks at all of its results before it accepts any
    (`skip_nonfinite`), they are computed a second time instead of being kept. A graph that draws
    random numbers, whose order matters, or that has no repeated layers, becomes one piece.

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
        runs = _merged(module.graph, runs_of(module.graph, labels), labels) or runs
    return _assembled(module, _pieces(module.graph, runs, labels))


def _merged(
    graph: fx.Graph, runs: list[list[Node]], labels: Mapping[Node, Label]
) -> list[list[Node]]:
    """Return the runs, neighbours as one where neither is like any other run; [] if none is."""
    forms = [_form(piece) for piece in _pieces(graph, runs, labels)]
    counts = Counter(forms)
    if len(counts) == len(forms):
        return []
    merged: list[list[Node]] = []
    joins = False
    for run, form in zip(runs, forms, strict=True):
        alone = counts[form] == 1 and not all(map(is_uncompiled, run))
        if joins and alone:
            merged[-1] += run
        else:
            merged.append(list(run))
        joins = alone
    return merged


def _pieces(graph: fx.Graph, runs: list[list[Node]], labels: Mapping[Node, Label]) -> list[_Piece]:
    place = {node: number for number, run in enumerate(runs) for node in run}
    written = _written(place)
    parts = []
    for number, run in enumerate(runs):
        reader = _Reader(place, labels, written, number)
        for node in run:
            reader.take(node)
        parts.append(([*dict.fromkeys([*reader.again, *reader.nodes])], [*reader.inputs]))
    needed = {source_of(node) for node in graph.output_node().all_input_nodes}
    needed.update(node for _, inputs in parts for node in inputs)
    return [
        _Piece(nodes, inputs, [node for node in run if node in needed and not writes(node)])
        for run, (nodes, inputs) in zip(runs, parts, strict=True)
    ]


@dataclass
class _Reader:
    """Collects the nodes of a piece, those that it computes again, and its inputs."""

    place: Mapping[Node, int]  # of each node: the number of its piece
    labels: Mapping[Node, Label]
    written: Mapping[Node, int]  # from `_written`
    here: int  # the number of this piece
    again: dict[Node, None] = field(default_factory=dict)  # before the piece writes into anything
    nodes: dict[Node, None] = field(default_factory=dict)
    inputs: dict[Node, None] = field(default_factory=dict)

    def take(self, node: Node) -> None:
        """Add a node of the piece's own, after what it reads."""
        for read in node.all_input_nodes:
            self._read(read, self.labels[node], self.nodes)
        self.nodes[node] = None

    def _read(self, node: Node, label: Label, into: dict[Node, None]) -> None:
        if is_free(node):
            for source in node.all_input_nodes:
                self._read(source, label, into)
            into[node] = None
        elif self._can_be_made_again(node, label):
            for source in node.all_input_nodes:
                self._read(source, label, self.again)
            self.again[node] = None
        elif self.place.get(node) != self.here:
            self.inputs[node] = None

    def _can_be_made_again(self, node: Node, label: Label) -> bool:
        """Return whether to compute an earlier piece's node a second time instead of keeping it.

        An optimizer that looks at all of its results before it accepts any would have all of them
        in memory. What it computes entry by entry takes no longer than to read the result.
        """
        if self.place.get(node, self.here) >= self.here or self.labels[node] != label:
            return False
        reads = [source_of(read) for read in node.all_input_nodes]
        unchanged = all(self.written.get(read, self.here) >= self.here for read in reads)
        pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
        return label.phase == "optimizer" and pointwise and unchanged


def _written(place: Mapping[Node, int]) -> dict[Node, int]:
    """Return, for each node that is written into, the number of the first piece that does."""
    written: dict[Node, int] = {}
    for node, number in place.items():
        for target in written_by(node):
            written.setdefault(source_of(target), number)
    return written


def _form(piece: _Piece) -> str:
    """Return a text that is the same for equal pieces."""
    names = {node: f"%{number}" for number, node in enumerate([*piece.inputs, *piece.nodes])}
    lines = [_described(node.meta.get("val")) for node in piece.inputs]
    for node in piece.nodes:
        lines.append(f"{node.target} {map_arg((node.args, node.kwargs), names.__getitem__)}")
    return "\n".join([*lines, str([names[node] for node in piece.outputs])])


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
            for target in written_by(node):
                # A fence writes into what stays in its piece, and nothing reads the fence.
                if (source := source_of(target)) in made:
                    made[node] = made[source]
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
    graph.eliminate_dead_code()  # what is only made again elsewhere
    graph.lint()
    return GraphModule(module, graph)
