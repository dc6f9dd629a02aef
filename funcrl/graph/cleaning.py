"""Rewrites that every traced graph gets: nothing in place, nothing unused, no view twice."""

import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx

aten = torch.ops.aten
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default,
    aten.t.default, aten.transpose.int, aten.permute.default, aten.slice.Tensor,
    aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default,
    aten.select.int, aten.detach.default, aten.alias.default, aten.unbind.int,
    aten.diagonal.default, aten.split.Tensor, aten.split_with_sizes.default,
    aten.as_strided.default, aten.lift_fresh.default, operator.getitem,
}  # fmt: skip


_SEEN_THROUGH = VIEWS | {aten._to_copy.default}
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}


def clean(module: GraphModule) -> GraphModule:
    """Return the traced graph without in-place operations, dead nodes and needless views.

    What writes into an input stays: it is what the function does.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from funcrl.graph.cleaning import clean
        >>> graph = make_fx(lambda x: (x.view(2) * 2).add_(1))(torch.ones(2))
        >>> [node.name for node in clean(graph).graph.nodes]
        ['x_1', 'mul', 'add_', 'output']
    """
    for node in list(module.graph.nodes):
        if node.target in _SPLITS:
            _replace_written_parts(node)
    replaced = [_replace_write(node) for node in list(module.graph.nodes) if writes(node)]
    if not all(replaced):
        module = _functionalized(module)
    views: dict[tuple[Any, str], Node] = {}
    for node in module.graph.nodes:
        if node.target in VIEWS:
            first = views.setdefault((node.target, f"{node.args} {node.kwargs}"), node)
            (source,) = node.all_input_nodes
            node.replace_all_uses_with(source if _same(node, source) else first)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def copied(graph: Graph) -> Graph:
    """Return a copy to rewrite, which takes and returns the same trees.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.cleaning import copied
        >>> module = funcrl.trace(lambda x: {"y": x + 1}, torch.ones(1))
        >>> torch.fx.GraphModule(module, copied(module.graph))(torch.ones(1))
        {'y': tensor([2.])}
    """
    new = Graph()
    result = new.graph_copy(graph, {})
    new.output(result).meta = dict(graph.output_node().meta)
    new.set_codegen(graph._codegen)
    return new


def arguments(node: Node) -> tuple[Any, ...]:
    """Return what a node is called with, without torch's type of it, which names every type.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.cleaning import arguments
        >>> arguments(list(funcrl.trace(lambda x: x.sum(0), torch.ones(1)).graph.nodes)[1])
        (arg0_1, [0])
    """
    return node.args


def look_through(node: Node) -> Node:
    """Return the node that a chain of views and casts starts from.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from funcrl.graph.cleaning import look_through
        >>> graph = make_fx(lambda x: x.t().double() + 1)(torch.ones(2, 3)).graph
        >>> look_through(list(graph.nodes)[2]).name
        'x_1'
    """
    while node.target in _SEEN_THROUGH and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def writes(node: Node) -> bool:
    """Return whether the node changes one of its arguments.

    Example:
        >>> import torch
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> from funcrl.graph.cleaning import writes
        >>> [writes(node) for node in make_fx(lambda x: x.add_(1))(torch.ones(1)).graph.nodes]
        [False, True, False]
    """
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def _replace_write(node: Node) -> bool:
    """Make `op_(x, ...)` an `op(x, ...)` that later nodes read; return False where x has views."""
    target = next(iter(arguments(node)), None)
    functional = _out_of_place(node.target)
    if not isinstance(target, Node) or functional is None:
        return False
    if target.op == "placeholder":
        return node.target is aten.copy_.default  # donation: it writes its result where it belongs
    # The order of users says nothing, so any view of the target may be read after the write.
    if _shares(target) or any(user.target in VIEWS for user in target.users):
        return False
    earlier = _before(node)
    node.target = functional
    target.replace_all_uses_with(node, lambda user: user is not node and user not in earlier)
    return True


def _replace_written_parts(split: Node) -> None:
    """Make a tensor that is filled through its parts a `cat` of them, where it is only that."""
    whole: Node = arguments(split)[0]
    parts = sorted(split.users, key=lambda part: arguments(part)[1])
    chains = [_written_in_turn(part) for part in parts]
    if whole.op != "call_function" or whole.target in VIEWS or len(parts) != len(split.meta["val"]):
        return
    if not all(len(chain) > 1 and not chain[-1].users for chain in chains):
        return
    order = {node: index for index, node in enumerate(split.graph.nodes)}
    readers = [user for user in whole.users if user is not split]
    done = max((chain[-1] for chain in chains), key=order.__getitem__)
    if any(order[reader] < order[done] for reader in readers):
        return
    for write in (node for chain in chains for node in chain[1:]):
        write.target = _out_of_place(write.target)
    axis = arguments(split)[2] if len(arguments(split)) > 2 else 0
    with split.graph.inserting_after(done):
        filled = split.graph.call_function(aten.cat.default, ([c[-1] for c in chains], axis))
    filled.meta = dict(whole.meta)
    whole.replace_all_uses_with(filled, lambda user: user in readers)


def _written_in_turn(part: Node) -> list[Node]:
    """Return the part and the in-place operations on it, as long as each is all that reads it."""
    chain = [part]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if not writes(user) or user.args[0] is not chain[-1] or not _out_of_place(user.target):
            break
        chain.append(user)
    return chain


def _shares(node: Node) -> bool:
    """Whether something else than this node can see its memory."""
    while node.target in VIEWS:
        node = node.all_input_nodes[0]
        if len(node.users) > 1 or node.op != "call_function":
            return True
    return writes(node)  # what is left of those is a write into an input, and gives that input


def _before(node: Node) -> set[Node]:
    nodes = set()
    for other in node.graph.nodes:
        if other is node:
            break
        nodes.add(other)
    return nodes


def _out_of_place(target: Any) -> Any:
    """Return the operation of the same name without the underscore, if it takes the same."""
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None or not name.endswith("_"):
        return None
    return getattr(packet, target._overloadname, None)


def _functionalized(module: GraphModule) -> GraphModule:
    """Let torch do it, through views as well; it forgets where the nodes came from."""
    inputs = [node.meta["val"] for node in module.graph.nodes if node.op == "placeholder"]
    codegen = module.graph._codegen
    module.graph.set_codegen(torch.fx.graph.CodeGen())
    module.recompile()
    result = make_fx(torch.func.functionalize(module), _allow_non_fake_inputs=True)(*inputs)
    result.graph.set_codegen(codegen)
    result.recompile()
    return result


def _same(node: Node, source: Any) -> bool:
    """Whether a view has its source's shape, strides and dtype."""
    new, old = node.meta.get("val"), getattr(source, "meta", {}).get("val")
    if not (isinstance(new, Tensor) and isinstance(old, Tensor)):
        return False
    return (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)
