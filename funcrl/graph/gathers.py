"""Parameters of which each rank holds some rows: gathered where a layer needs them."""

from collections.abc import Iterator
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, GraphModule, Node

from funcrl.graph.nodes import (
    Origin,
    Phase,
    Writer,
    as_module,
    copied,
    recorded_origin,
    set_origin,
    shape_of,
)

_C10D, _ATEN = torch.ops._c10d_functional, torch.ops.aten
_CAST = _ATEN._to_copy.default
# What may stand between a gather and what computes with the parameter: nothing of it is computed.
_ON_THE_WAY = {
    _C10D.wait_tensor.default,
    _ATEN.slice.Tensor,
    _ATEN.select.int,
    _ATEN.view.default,
    _ATEN.t.default,
    _ATEN.transpose.int,
    _ATEN.permute.default,
    _ATEN.unsqueeze.default,
    _ATEN.expand.default,
    _ATEN.detach.default,
    _CAST,
}
_BEFORE_SCATTERING = {
    _CAST,
    _ATEN.constant_pad_nd.default,
    _ATEN.unsqueeze.default,
    _ATEN.view.default,
}


class _Fetch(NamedTuple):
    """A parameter that is whole for the nodes of one layer and pass that read it."""

    parts: list[Node]  # the gather, its wait, and views and casts of the parameter that are read
    cast: Node | None  # the one that all of them pass through, if there is one
    readers: list[Node]

    @property
    def bucket(self) -> tuple[Any, ...]:
        """What the parameters that travel together have in common."""
        first, gather = self.readers[0], self.parts[0]
        origin, dtype = recorded_origin(first), shape_of(self.cast or gather).dtype
        return _is_late(first), origin.microbatch, origin.layer, dtype, gather.args[1:]


def gather_late(module: GraphModule) -> GraphModule:
    """Return a traced step whose parameters are gathered where they are needed, layer by layer.

    The parameters of a layer travel together, in the dtype that they are read in, while the layer
    before computes. They are whole in each forward and backward pass until their last use there,
    and a gradient is scattered as soon as it is whole. So the parameters and gradients of two
    layers are whole at a time, where a step as written gathers all of them first. The price is a
    second gather of each parameter, in the backward pass. Every bit is kept.

    Args:
        module: a traced step, after `remat`; without gathers of its inputs it is returned as it is.
    """
    if not any(_is_of_input(node) for node in module.graph.nodes):
        return module
    graph = copied(module.graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    gathers = [node for node in graph.nodes if _is_of_input(node)]
    parameters = [_parameter(gather) for gather in gathers]
    fetches = [fetch for parts in parameters for fetch in _fetches(parts, places)]
    fetches.sort(key=lambda fetch: places[fetch.readers[0]])
    buckets = [list(bucket) for _, bucket in groupby(fetches, key=lambda fetch: fetch.bucket)]
    # Each travels from where the one before it is first read.
    for earlier, bucket in pairwise([buckets[0], *buckets]):
        _gather_bucket(graph, bucket, sent_at=earlier[0].readers[0])
    for parts in parameters:
        for part in reversed(parts):
            graph.erase_node(part)
    _scatter_early(graph)
    return as_module(graph, module)


def _is_of_input(node: Node) -> bool:
    """Return whether a node gathers an input of the step as it is."""
    return node.target is _C10D.all_gather_into_tensor.default and _input_of(node) is not None


def _input_of(gather: Node) -> Node | None:
    """Return the input of the step that a node gathers, if nothing is computed of it before."""
    source = gather.all_input_nodes[0]
    while source.target in (_ATEN.unsqueeze.default, _ATEN.detach.default):
        source = source.all_input_nodes[0]
    return source if source.op == "placeholder" else None


def _parameter(gather: Node) -> list[Node]:
    """Return a gather and the nodes after it that give the parameter and views of it, in order."""
    parts = [gather]
    for part in parts:  # which grows
        parts += [user for user in part.users if user.target in _ON_THE_WAY and user not in parts]
    return parts


def _is_late(node: Node) -> bool:
    """Return whether a node belongs to a backward pass, for which some are computed again."""
    return recorded_origin(node).phase != "forward" or bool(node.meta.get("recomputed"))


def _fetches(parts: list[Node], places: dict[Node, int]) -> Iterator[_Fetch]:
    """Yield a fetch of a parameter for each pass that reads it."""
    passes: dict[tuple[bool, int], list[Node]] = {}
    users = {user for part in parts for user in part.users} - {*parts}
    for user in sorted(users, key=places.__getitem__):
        passes.setdefault((_is_late(user), recorded_origin(user).microbatch), []).append(user)
    for readers in passes.values():
        read = {part for reader in readers for part in reader.all_input_nodes} & {*parts}
        needed = {*read}
        for part in reversed(parts):
            if part in needed:
                needed |= {*part.all_input_nodes} & {*parts}
        casts = [part for part in parts if part in needed and part.target is _CAST]
        cast = casts[0] if len(casts) == 1 and _only_through(casts[0], parts, read) else None
        yield _Fetch([part for part in parts if part in needed], cast, readers)


def _only_through(cast: Node, parts: list[Node], read: set[Node]) -> bool:
    """Return whether all that is read of a parameter is behind a cast of it to another dtype."""
    if cast.kwargs.keys() != {"dtype"}:
        return False
    behind = {cast}
    for part in parts:
        if behind & {*part.all_input_nodes}:
            behind.add(part)
    return read <= behind


class _Put(Writer):
    """Adds nodes before a place, of the layer and pass of the node they are made for."""

    def __init__(self, graph: Graph, place: Node, source: Node, is_sent: bool = False) -> None:
        super().__init__(graph, place, source)
        phase: Phase = "backward" if _is_late(source) else "forward"
        self.origin = recorded_origin(source)._replace(phase=phase, forward="", is_sent=is_sent)

    def __call__(self, op: Any, *args: Any, **kwargs: Any) -> Node:
        """Return a new node that computes `op(*args)`."""
        node = super().__call__(op, *args, **kwargs)
        set_origin(node, self.origin)
        return node


def _gather_bucket(graph: Graph, bucket: list[_Fetch], sent_at: Node) -> None:
    """Gather parameters in one collective, and give them to their readers.

    Args:
        graph: to write in.
        bucket: of one layer and pass, in the order in which they are read.
        sent_at: the node before which the collective begins; it is waited for at the first reader.
    """
    first = bucket[0].readers[0]
    send, take = _Put(graph, sent_at, first, is_sent=True), _Put(graph, first, first)
    _, size, group = bucket[0].parts[0].args
    shards = []
    for fetch in bucket:
        source = _input_of(fetch.parts[0])
        assert source is not None
        shard = send.cast(source, shape_of(fetch.cast or source).dtype)
        shards.append(send(_ATEN.view.default, shard, [-1]))
    flat = shards[0] if len(shards) == 1 else send(_ATEN.cat.default, shards)
    sent = send(_C10D.all_gather_into_tensor.default, flat, size, group)
    whole = take(_C10D.wait_tensor.default, sent)
    lengths = [shape_of(shard).numel() for shard in shards]
    if len(shards) == 1:
        columns = [whole]
    else:
        of_ranks = take(_ATEN.view.default, whole, [size, -1])
        ends = [sum(lengths[: place + 1]) for place in range(len(lengths))]
        columns = [
            take(_ATEN.slice.Tensor, of_ranks, 1, end - length, end)
            for end, length in zip(ends, lengths, strict=True)
        ]
    for fetch, column in zip(bucket, columns, strict=True):
        _give(graph, fetch, column)


def _give(graph: Graph, fetch: _Fetch, column: Node) -> None:
    """Give a parameter that has been gathered, flat or a column a rank, to its readers."""
    reader = fetch.readers[0]
    take = _Put(graph, reader, reader)
    shape = list(shape_of(fetch.parts[0]).shape)
    if not shape_of(column).is_contiguous():
        column = take(_ATEN.clone.default, column, memory_format=torch.contiguous_format)
    made = {fetch.parts[1]: take(_ATEN.view.default, column, shape)}
    for part in fetch.parts[2:]:
        (source,) = part.all_input_nodes
        if part is fetch.cast:
            made[part] = made[source]
            continue
        args = torch.fx.node.map_arg(part.args, made.__getitem__)
        made[part] = take(part.target, *args, **part.kwargs)
    for reader in fetch.readers:
        for part in {*reader.all_input_nodes} & made.keys():
            reader.replace_input_with(part, made[part])


def _scatter_early(graph: Graph) -> None:
    """Scatter each gradient when it is whole, and wait when the next layer's have been sent."""
    target = _C10D.reduce_scatter_tensor.default
    scatters = [_Scatter(node) for node in graph.find_nodes(op="call_function", target=target)]
    places = {node: place for place, node in enumerate(graph.nodes)}
    scatters.sort(key=lambda scatter: places[scatter.gradient])
    layers = [list(layer) for _, layer in groupby(scatters, key=lambda scatter: scatter.layer)]
    for layer in layers:
        for scatter in layer:
            scatter.send()
    for layer, following in zip(layers, [*layers[1:], *layers[-1:]], strict=True):
        # A micro-batch's gradients are added to those before it while the next one has not begun.
        is_last = following[0].layer[0] > layer[0].layer[0]
        for scatter in layer:
            scatter.wait((layer if is_last else following)[-1].node)


class _Scatter:
    """The reduce-scatter of a gradient, with what makes its argument and reads its result."""

    def __init__(self, node: Node) -> None:
        self.node, self.before, self.after = node, list[Node](), list[Node]()
        self.gradient = node.all_input_nodes[0]
        while self.gradient.target in _BEFORE_SCATTERING and len(self.gradient.users) == 1:
            self.before.insert(0, self.gradient)
            self.gradient = self.gradient.all_input_nodes[0]
        last = node
        while len(last.users) == 1 and (user := next(iter(last.users))).target in _ON_THE_WAY:
            self.after.append(user)
            last = user

    @property
    def layer(self) -> tuple[int, str]:
        """Of the gradient, with its micro-batch."""
        origin = recorded_origin(self.gradient)
        return origin.microbatch, origin.layer

    def send(self) -> None:
        """Put the scatter behind the gradient."""
        origin = recorded_origin(self.gradient)._replace(forward="")
        _move_behind(self.gradient, [*self.before, self.node], origin)
        set_origin(self.node, origin._replace(is_sent=True))

    def wait(self, sent: Node) -> None:
        """Put what waits for the scatter behind one that was sent later, or behind itself."""
        _move_behind(sent, self.after, recorded_origin(sent)._replace(is_sent=False))


def _move_behind(place: Node, nodes: list[Node], origin: Origin) -> None:
    for node in nodes:
        place.append(node)
        set_origin(node, origin)
        place = node
