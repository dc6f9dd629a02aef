"""What a node of a graph is and costs, and what passes rewrite a graph with."""

import operator
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial, reduce
from heapq import heappop, heappush
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.fx import Graph, GraphModule, Node
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.node import map_arg

from funcrl.core.custom_op import FLOPS
from funcrl.graph.aliases import is_view, writes, written_by

Phase: TypeAlias = Literal["input", "forward", "backward", "optimizer", "output"]
_KEY = "origin"


class Origin(NamedTuple):
    """The part of a step that a node belongs to; a field is empty where nothing was recorded."""

    phase: Phase  # "optimizer" is all that follows a backward pass
    microbatch: int = 0  # how many backward passes ended before: the number of the micro-batch
    layer: str = ""  # such as "blocks.3": the path of the outermost module that has a number
    module: str = ""  # the path of the module, such as "blocks.3.attention.q"
    forward: str = ""  # on a backward node, the name of the node that it differentiates
    is_seed: bool = False  # what a backward pass begins with, such as the `ones_like` of a loss
    path: str = ""  # on an input, its place in the arguments: "0.params.norm.weight"
    is_sent: bool = False  # whether it is, or makes, what a rank sends to others meanwhile


def origin_of(node: Node) -> Origin:
    """Return a node's origin, or that of its first input if a pass has given it none."""
    while _KEY not in node.meta and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return recorded_origin(node)


def recorded_origin(node: Node) -> Origin:
    """Return a node's own origin: the forward pass where nothing was recorded."""
    origin: Origin = node.meta.get(_KEY, Origin("forward"))
    return origin


def set_origin(node: Node, origin: Origin) -> None:
    """Set a node's origin."""
    node.meta[_KEY] = origin


def copy_origin(node: Node, source: Node) -> None:
    """Give a new node the origin of the node that it is made for."""
    if _KEY in source.meta:
        node.meta[_KEY] = source.meta[_KEY]


def is_late(node: Node) -> bool:
    """Return whether a node belongs to a backward pass or to what follows one."""
    return origin_of(node).phase in ("backward", "optimizer")


def layer_of(module: str) -> str:
    """Return a module's path up to its first number, which is its place in a list of modules."""
    names = module.split(".")
    numbers = [place for place, name in enumerate(names) if name.isdigit()]
    return ".".join(names[: numbers[0] + 1]) if numbers else ""


aten = torch.ops.aten
# Attention in one kernel, and how many products it does: torch counts some of them, and with as
# many keys as queries alone in older versions.
_ATTENTION = {
    aten._scaled_dot_product_flash_attention: 2,
    aten._scaled_dot_product_flash_attention_for_cpu: 2,
    aten._scaled_dot_product_cudnn_attention: 2,
    aten._scaled_dot_product_flash_attention_backward: 5,
    aten._scaled_dot_product_cudnn_attention_backward: 5,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: 5,
}


def has_flops(node: fx.Node) -> bool:
    """Return whether a node is a product, as torch's flop counter says, or attention."""
    return _formula(node) is not None


def count_flops(node: fx.Node) -> int:
    """Return the operations of a product, a causal one counted in full, and 0 for other nodes."""
    formula = _formula(node)
    if formula is None:
        return 0
    values: Any = fx.node.map_arg((node.args, node.kwargs, node), lambda read: read.meta["val"])
    args, kwargs, result = values
    return int(formula(*args, **kwargs, out_val=result))


def _formula(node: fx.Node) -> Callable[..., int] | None:
    """Return what counts a node's operations, given its arguments and its result."""
    from torch.utils.flop_counter import flop_registry, shape_wrapper  # imports Triton

    packet: Any = getattr(node.target, "overloadpacket", node.target)
    if packet in _ATTENTION:
        return partial(_count_attention, _ATTENTION[packet])
    return shape_wrapper(FLOPS[packet]) if packet in FLOPS else flop_registry.get(packet)


def _count_attention(products: int, *args: Any, **_: Any) -> int:
    q, k = args[:2] if products == 2 else args[1:3]
    return products * 2 * int(q.numel()) * int(k.shape[-2])


def draws(node: fx.Node) -> bool:
    """Return whether an op draws numbers; attention without dropout draws none, despite its tag."""
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else argument.default_value
            return bool(given)
    return True


GATHERED = "gathered"  # the phase of a list of many numbers, such as the norms of all leaves
SENT = "sent in "  # and a phase: what ranks send each other while they compute
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
    if origin.is_sent:
        return Label(origin.microbatch, SENT + origin.phase, origin.layer or origin.module)
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


def is_uncompiled(node: Node) -> bool:
    """Return whether a node of a piece of its own is run as it is.

    A compiler that does not see who waits for a collective could give the memory of what is sent
    to another tensor meanwhile.
    """
    return is_gathering(node) or recorded_origin(node).is_sent


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
    """Return whether a cast can be computed at any of its readers instead of at its place.

    Not if the graph returns it, or if its source is written into before one of them.
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
    """Return the nodes in order, but those that wait for nothing just before their first reader."""
    place = {node: number for number, node in enumerate(graph.nodes)}

    def order(node: Node) -> tuple[int, int]:
        first = min((place[reader] for reader in followers[node]), default=place[node])
        is_fixed = waits[node] or recorded_origin(node).is_sent
        return (place[node], 1) if is_fixed else (first, 0)

    return sorted(waits, key=order)


def _waits(labels: Mapping[Node, Label]) -> dict[Node, set[Node]]:
    """Return the nodes that must run before each node: its inputs, and those that read its target.

    A node that reads memory through a view waits for the last write into that memory.
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
