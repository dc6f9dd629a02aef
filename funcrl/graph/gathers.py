"""Parameters of which each rank holds some rows: gathered where a layer needs them."""

import torch
from torch.fx import Graph, GraphModule, Node

from funcrl.graph.nodes import as_module, copied, recorded_origin, set_origin

_C10D, _ATEN = torch.ops._c10d_functional, torch.ops.aten
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
    _ATEN._to_copy.default,
}
_BEFORE_SCATTERING = {
    _ATEN._to_copy.default,
    _ATEN.constant_pad_nd.default,
    _ATEN.unsqueeze.default,
    _ATEN.view.default,
}


def gather_late(module: GraphModule) -> GraphModule:
    """Return a traced step whose parameters are gathered where they are needed, layer by layer.

    A parameter is gathered before its first use in each forward and backward pass, and let go after
    the last one there; a gradient is scattered as soon as it is whole. So one layer's parameters
    and gradients are whole at a time, where a step as written gathers all of them first. The price
    is a second gather of each parameter, in the backward pass. Every bit is kept.

    Args:
        module: a traced step, after `remat`; without gathers of its inputs it is returned as it is.
    """
    if not any(_is_of_input(node) for node in module.graph.nodes):
        return module
    graph = copied(module.graph)
    gathers = [node for node in graph.nodes if _is_of_input(node)]
    places = {node: place for place, node in enumerate(graph.nodes)}
    for gather in gathers:
        parts = _parameter(gather)  # the gather, and views of what it gives
        passes: dict[tuple[bool, int], list[Node]] = {}
        users = {user for part in parts for user in part.users} - {*parts}
        for user in sorted(users, key=places.__getitem__):
            origin = recorded_origin(user)
            # What is computed again is so for the backward pass.
            is_late = origin.phase != "forward" or bool(user.meta.get("recomputed"))
            passes.setdefault((is_late, origin.microbatch), []).append(user)
        for readers in passes.values():
            _gather_for(graph, parts, readers)
        for part in reversed(parts):
            graph.erase_node(part)
    for scatter in graph.find_nodes(op="call_function", target=_C10D.reduce_scatter_tensor.default):
        _move_after_gradient(scatter)
    return as_module(graph, module)


def _is_of_input(node: Node) -> bool:
    """Return whether a node gathers an input of the step as it is."""
    if node.target is not _C10D.all_gather_into_tensor.default:
        return False
    source = node.all_input_nodes[0]
    while source.op == "call_function" and len(source.all_input_nodes) == 1:
        if source.target not in (_ATEN.unsqueeze.default, _ATEN.detach.default):
            return False
        source = source.all_input_nodes[0]
    return source.op == "placeholder"


def _parameter(gather: Node) -> list[Node]:
    """Return a gather and the nodes after it that give the parameter and views of it, in order."""
    parts = [gather]
    for part in parts:  # which grows
        parts += [user for user in part.users if user.target in _ON_THE_WAY and user not in parts]
    return parts


def _gather_for(graph: Graph, parts: list[Node], readers: list[Node]) -> None:
    """Gather a parameter before the first of the nodes that read it, in the graph's order."""
    needed = {read for reader in readers for read in reader.all_input_nodes} & {*parts}
    for part in reversed(parts):
        if part in needed:
            needed |= {*part.all_input_nodes} & {*parts}
    made: dict[Node, Node] = {}
    origin = recorded_origin(readers[0])._replace(forward="")
    with graph.inserting_before(readers[0]):
        for part in parts:
            if part in needed:
                made[part] = graph.node_copy(part, lambda read: made.get(read, read))
                set_origin(made[part], origin)  # of the layer that reads it
    for reader in readers:
        for part in {*reader.all_input_nodes} & made.keys():
            reader.replace_input_with(part, made[part])


def _move_after_gradient(scatter: Node) -> None:
    """Put a scatter, and what makes its argument of a gradient, behind that gradient."""
    chain, source = [scatter], scatter.all_input_nodes[0]
    while source.target in _BEFORE_SCATTERING and len(source.users) == 1:
        chain.insert(0, source)
        source = source.all_input_nodes[0]
    node = scatter
    while len(node.users) == 1:
        (node,) = node.users
        if node.target not in _ON_THE_WAY:
            break
        chain.append(node)
    place = source
    for node in chain:
        place.append(node)
        set_origin(node, recorded_origin(source)._replace(forward=""))
        place = node
