"""Which nodes of a step's flat graph are its backward pass, and which layer a node belongs to.

A trace that recorded it says so itself, as `funcrl.trace` does: `node.meta["phase"]` and
`node.meta["module"]`, such as `blocks.3.mlp`. Without them both are read from the structure.
"""

import re
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from torch import fx
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_LAYER = re.compile(r"(?:[^.]*\.)*?\d+(?=\.|$)")

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


def late_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes of the backward pass, and of all that waits for it.

    Without marks it is what depends on a gradient's seed, the `ones_like` of the loss, and what is
    computed after a seed for nothing else (such as a transposed weight).

    Args:
        graph: of a whole step, or of a gradient.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.remat import phases
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(torch.func.grad(lambda x: x.exp().sum()))(torch.zeros(3))
        >>> sorted(node.name for node in phases.late_nodes(gm.graph))
        ['expand', 'mul', 'ones_like']
    """
    again = {node for node in graph.nodes if node.meta.get("recomputed")}
    marked = {node for node in graph.nodes if _is_marked(node)}
    if marked:
        return descendants(graph, marked) | again
    seeds = find_seeds(graph)
    late = descendants(graph, seeds) | again
    started = False
    after = [node for node in graph.nodes if (started := started or node in seeds)]
    for node in reversed(after):
        # A loss goes nowhere but into its seed, which does not read its value.
        if node.op == "call_function" and node.users and late.issuperset(node.users):
            late.update({node} if seeds.isdisjoint(node.users) else ())
    return late


def find_seeds(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that start a backward pass: the innermost `ones_like` of a loss.

    A loss is a scalar, or one number a sample; a seed leads to no other seed.

    Args:
        graph: of a whole step, or of a gradient.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.remat import phases
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(torch.func.grad(lambda x: x.exp().sum()))(torch.zeros(3))
        >>> phases.find_seeds(gm.graph)
        {ones_like}
    """
    candidates = [
        node
        for node in graph.nodes
        if node.target is aten.ones_like.default and node.meta["val"].ndim <= 1
    ]
    outer = {node for node in candidates if any(other in _reached(node) for other in candidates)}
    return set(candidates) - outer


def find_layers(graph: fx.Graph, late: set[fx.Node]) -> dict[fx.Node, str]:
    """Return the repeated layer of each forward node that is in one.

    A layer is a module path up to its first number, `blocks.3`. Without paths, places in the
    forward pass through which all of it flows (a residual stream) cut it into pieces, and the
    pieces that repeat are the layers. What a layer alone makes of one input, such as a weight's
    cast, belongs to it.

    Args:
        graph: of a whole step, or of a gradient.
        late: `late_nodes(graph)`.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.remat import phases
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x.exp().sin())(torch.zeros(3))
        >>> exp, sin = [node for node in gm.graph.nodes if node.op == "call_function"]
        >>> exp.meta["module"], sin.meta["phase"] = "blocks.0.mlp", "backward"
        >>> phases.find_layers(gm.graph, late={sin})
        {exp: 'blocks.0'}
    """
    early = [node for node in graph.nodes if node.op == "call_function" and node not in late]
    layers: dict[fx.Node, str] = {}
    # A trace that marked no backward pass has not watched the modules: a few names prove little.
    if any(_is_marked(node) for node in late):
        for node in early:
            layer = layer_of_path(node.meta.get("module"))
            if layer:
                layers[node] = layer
    if not layers:
        for seed in find_seeds(graph):
            layers |= _pieces(graph, early, seed)
    alone: set[fx.Node] = set()
    for node in early:
        if len(node.all_input_nodes) == 1:
            source = node.all_input_nodes[0]
            if source.op == "placeholder" or source in alone:
                alone.add(node)
    for node in reversed(early):
        users = {layers.get(user) for user in node.users if user not in late}
        if node in alone and node not in layers and len(users) == 1 and None not in users:
            layers[node] = str(users.pop())
    return layers


def layer_of_path(path: str | None) -> str:
    """Return a module's path up to its first number, "" where there is none.

    Args:
        path: `node.meta["module"]`.

    Example:
        >>> from funcrl.graph.remat.phases import layer_of_path
        >>> layer_of_path("blocks.3.attention.q"), layer_of_path("embed"), layer_of_path(None)
        ('blocks.3', '', '')
    """
    found = _LAYER.match(path or "")
    return found[0] if found else ""


def _is_marked(node: fx.Node) -> bool:
    """Whether the trace itself, not `remat`, said that a node is of the backward pass."""
    return node.meta.get("phase") == "backward" and not node.meta.get("recomputed")


def _pieces(graph: fx.Graph, early: list[fx.Node], seed: fx.Node) -> dict[fx.Node, str]:
    """Cut the forward pass of one loss where all of it flows through one node."""
    path = _path(graph, early, seed)
    places = {node: place for place, node in enumerate(path)}
    cuts, reach = [], 0
    for place, node in enumerate(path):
        if reach <= place:
            cuts.append(node)
        reach = max([reach, *(places[user] for user in node.users if user in places)])
    kinds = [
        tuple(str(node.target) for node in path[places[start] + 1 : places[end] + 1])
        for start, end in pairwise(cuts)
    ]
    # A layer is more than a chain of pointwise ops: something in it is multiplied.
    heavy = {str(op) for op in _overloads_with_flops(path)}
    counts = Counter(kind for kind in kinds if heavy & set(kind))
    repeated = [place for place, kind in enumerate(kinds) if counts[kind] > 1]
    if not repeated:
        return {}
    starts = [place for place, kind in enumerate(kinds) if kind == kinds[repeated[0]]]
    starts.append(min(starts[-1] + starts[1] - starts[0], len(kinds)))
    order = {node: place for place, node in enumerate(graph.nodes)}
    bounds = [order[cuts[start]] for start in starts]
    return {
        node: f"{seed.name}.{number}"
        for number, (start, end) in enumerate(pairwise(bounds))
        for node in early
        if start < order[node] <= end
    }


def _path(graph: fx.Graph, early: list[fx.Node], seed: fx.Node) -> list[fx.Node]:
    """Return what leads to a loss and depends both on floats and on tokens, in order."""
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    floats = {node for node in inputs if node.meta["val"].is_floating_point()}
    mixed = descendants(graph, floats) & descendants(graph, set(inputs) - floats)
    needed = {seed}
    for node in reversed(graph.nodes):
        if node in needed:
            needed.update(node.all_input_nodes)
    return [node for node in early if node in needed and node in mixed]


def descendants(graph: fx.Graph, sources: set[fx.Node]) -> set[fx.Node]:
    """Return the sources and every node that depends on one; the output node is not among them.

    Args:
        graph: any.
        sources: nodes of it.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.remat import phases
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> graph = make_fx(lambda x, y: x.exp() + y.sin())(torch.zeros(3), torch.zeros(3)).graph
        >>> y = next(node for node in graph.nodes if node.name == "y_1")
        >>> sorted(node.name for node in phases.descendants(graph, {y}))
        ['add', 'sin', 'y_1']
    """
    found = set(sources)
    for node in graph.nodes:
        if node.op != "output" and not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def _reached(source: fx.Node) -> set[fx.Node]:
    """Return every node that depends on one, without it."""
    found: set[fx.Node] = set()
    waiting = [source]
    while waiting:
        new = set(waiting.pop().users) - found
        found |= new
        waiting += new
    return found


def has_flops(node: fx.Node) -> bool:
    """Return whether a node is a product: torch's flop counter counts its work, or it is attention.

    Args:
        node: of a flat graph.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.remat import phases
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x @ x).exp())(torch.zeros(3, 3))
        >>> [node.name for node in gm.graph.nodes if phases.has_flops(node)]
        ['mm']
    """
    packet = getattr(node.target, "overloadpacket", node.target)
    return packet in flop_registry or packet in _ATTENTION


def count_flops(node: fx.Node) -> int:
    """Return the operations of a product, 0 for any other node; nothing is taken off for causality.

    Args:
        node: of a flat graph, with `node.meta["val"]`.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.remat import phases
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x @ x).exp())(torch.zeros(3, 3))
        >>> [phases.count_flops(node) for node in gm.graph.nodes]
        [0, 54, 0, 0]
    """
    if not has_flops(node):
        return 0
    values: Any = fx.node.map_arg((node.args, node.kwargs, node), lambda read: read.meta["val"])
    args, kwargs, result = values
    packet: Any = getattr(node.target, "overloadpacket", node.target)
    if packet in _ATTENTION:
        q, k = args[:2] if _ATTENTION[packet] == 2 else args[1:3]
        return _ATTENTION[packet] * 2 * q.numel() * k.shape[-2]
    return int(flop_registry[packet](*args, **kwargs, out_val=result))


def draws(node: fx.Node) -> bool:
    """Return whether an op draws numbers; attention without dropout draws none, despite its tag.

    Args:
        node: of a flat graph.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.remat import phases
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: torch.rand_like(x) + 1)(torch.zeros(3))
        >>> [node.name for node in gm.graph.nodes if phases.draws(node)]
        ['rand_like']
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    target: Any = node.target
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == "dropout_p":
            given = node.args[place] if place < len(node.args) else argument.default_value
            return bool(given)
    return True


def _overloads_with_flops(nodes: list[fx.Node]) -> set[object]:
    return {node.target for node in nodes if has_flops(node)}
