"""Operations in place as operations out of place, so that passes may move what reads their values.

A graph without writes is one whose values never change. The only writes that stay are copies into
inputs, at the end: they are what the function does to its arguments (`funcrl.donate`).
"""

from itertools import combinations, product
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree

from funcrl.graph.aliases import (
    SILENT_VIEWS,
    Sharing,
    find_storages,
    gives_view,
    is_view,
    looks_alike,
    overlap,
    overlaps_itself,
    writes,
    written_by,
)
from funcrl.graph.nodes import (
    arguments,
    copy_origin,
    example_of,
    nodes_after,
    origin_of,
    set_origin,
)

aten = torch.ops.aten
_SPLITS = {aten.split.Tensor, aten.split_with_sizes.default}
_STRIDED = {aten.as_strided.default, aten.as_strided_.default}


def without_writes(module: GraphModule) -> GraphModule:
    """Return the traced graph with no write but copies into inputs that nothing reads afterwards.

    A write whose value is read under one name alone becomes the operator without the underscore. In
    a graph where a value is read through several views of it, torch makes each view anew. The
    module is changed.
    """
    _check_writes(module)
    if _rewrite(module.graph):
        return module
    _spell_out_views(module.graph)
    return _functionalized(module)


def _check_writes(module: GraphModule) -> None:
    """Refuse the writes whose result is in doubt, before any is touched."""
    writers = [node for node in module.graph.nodes if writes(node)]
    if not writers:
        return
    storages, _, written = find_storages(module)
    held = {storages[node][0] for node in module.graph.find_nodes(op="get_attr")}
    whole: dict[int, Any] = {}  # of each storage: the value that was allocated with it
    for node, found in storages.items():
        value = node.meta.get("val")
        values = value if isinstance(value, list | tuple) else [value]
        for storage, each in zip(found, values, strict=bool(found)):  # the output has none
            whole.setdefault(storage, each)
    for node in module.graph.nodes:
        if node.target not in _STRIDED or written.keys().isdisjoint(storages[node]):
            continue
        # Its places in memory are counted from the start of what was allocated.
        if not looks_alike(node.all_input_nodes[0].meta["val"], whole[storages[node][0]]):
            _refuse(node, "takes as_strided of a view of memory that is written into")
    for node in writers:
        _check_dtype(node)
        targets = written_by(node)
        for target in targets:
            if not held.isdisjoint(storages[target]):
                _refuse(node, "writes into a tensor that the function holds itself")
            if any(overlaps_itself(each.meta["val"]) for each in _chain(target)):
                _refuse(node, "writes into elements that share memory, as in an expanded tensor")
        read = [each for each in node.all_input_nodes if each not in targets]
        pairs = [*product(targets, read), *combinations(targets, 2)]
        for target, other in pairs:
            if not {*storages[target]}.isdisjoint(storages[other]) and _differ(target, other, read):
                _refuse(node, "has arguments that overlap, one of which it overwrites")


def _differ(target: Node, other: Node, read: list[Node]) -> bool:
    """Return whether two arguments overlap, but for one that is read and written in place."""
    first, second = target.meta["val"], other.meta["val"]
    return not (other in read and looks_alike(first, second)) and overlap(first, second)


def _refuse(node: Node, what: str) -> NoReturn:
    raise ValueError(
        f"trace expects in-place operations with one result, whatever the order in which memory is "
        f"written, and into nothing but what the function gets and makes; got {node.target}, which "
        f"{what}."
    )


def _check_dtype(node: Node) -> None:
    """Refuse `out=` of another dtype than the operation gives: some then compute in that one."""
    operation: Any = node.target
    out = [each.name for each in operation._schema.arguments if each.is_out]
    if not out:
        return
    kwargs = {name: value for name, value in node.kwargs.items() if name not in out}
    given = example_of(operation.overloadpacket, node.args, kwargs, like=written_by(node)[0])
    given = given if isinstance(given, list | tuple) else [given]
    targets = [target.meta["val"] for target in written_by(node)]
    if [each.dtype for each in given] != [each.dtype for each in targets]:
        _refuse(node, f"has out= of {targets[0].dtype} for a result of {given[0].dtype}")


def _chain(node: Node) -> list[Node]:
    """Return a node, the node that it is a view of, and so on."""
    chain = [node]
    while (is_view(chain[-1]) or writes(chain[-1])) and chain[-1].all_input_nodes:
        chain.append(chain[-1].all_input_nodes[0])
    return [each for each in chain if isinstance(each.meta.get("val"), Tensor)]


# -- one write, one value ---------------------------------------------------------------------


def _rewrite(graph: Graph) -> bool:
    """Write each operation out of place; return False at one that this cannot express."""
    sharing = Sharing()
    for node in graph.nodes:  # and those that are added after it on the way
        if node.op == "output":
            continue
        if writes(node) and not _replace_write(node, sharing):
            return False
        value = node.meta.get("val")
        sharing.add(node, len(value) if isinstance(value, list | tuple) else 1)
        if node.target in _SPLITS:
            _replace_written_parts(node, sharing)
    return True


def _replace_write(node: Node, sharing: Sharing) -> bool:
    """Replace `op_(x, ...)` by `op(x, ...)`, unless another view of x is read later."""
    functional = _out_of_place(node.target)
    if functional is None or written_by(node) != [node.args[0]]:
        return False
    target = arguments(node)[0]
    if not isinstance(target.meta.get("val"), Tensor):
        return False
    members = sharing.members[sharing.of[target][0]]
    if members[0].op == "placeholder":
        # Donation: the write puts its result where it belongs, and nobody reads it there.
        read_later = any(
            user > node and user.op != "output" for member in members for user in member.users
        )
        return node.target is aten.copy_.default and target is members[0] and not read_later
    if _is_of_the_name_alone(node.target):
        if not gives_view(functional):
            return False
    elif any(user > node for member in members if member is not target for user in member.users):
        return False
    node.target = functional
    result = node if gives_view(functional) else _as_written(node, target)
    later = [user for user in target.users if user > node and user is not result]
    target.replace_all_uses_with(result, lambda user: user in later)
    return True


def _out_of_place(target: Any) -> Any:
    """Return the operator that computes the same out of place, None if there is none."""
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    if packet is None or not name.endswith("_") or name.endswith("__"):
        return None
    wanted = _signature(target)
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return next((each for each in overloads if _signature(each) == wanted), None)


def _is_of_the_name_alone(target: Any) -> bool:
    """Return whether an operator, such as `t_`, changes the strides of a tensor and no element."""
    return torch.Tag.inplace_view in target.tags


def _signature(target: Any) -> list[tuple[str, str]]:
    """Return the names and types of what an operator takes."""
    return [(argument.name, str(argument.type)) for argument in target._schema.arguments]


def _as_written(node: Node, target: Node) -> Node:
    """Return the result as the write would have left it: in the target's dtype and strides."""
    described: Tensor = target.meta["val"]
    operation: Any = node.target
    node.meta["val"] = value = example_of(operation, node.args, node.kwargs, like=target)
    layout = (described.shape, described.stride(), described.dtype)
    if (value.shape, value.stride(), value.dtype) == layout:
        return node
    with node.graph.inserting_after(node):
        written = node.graph.call_function(aten.copy.default, (target, node))
    copy_origin(written, node)
    written.meta["val"] = described
    node.replace_all_uses_with(written, lambda user: user is not written)
    return written


def _replace_written_parts(split: Node, sharing: Sharing) -> None:
    """Replace a tensor that is only filled through its parts by a `cat` of them."""
    whole: Node = split.all_input_nodes[0]
    parts = sorted(split.users, key=lambda part: arguments(part)[1])
    chains = [_written_in_turn(part) for part in parts]
    if whole.op != "call_function" or len(parts) != len(split.meta["val"]):
        return
    seen = {member for storage in sharing.of[split] for member in sharing.members[storage]}
    if seen != {whole, split} or not all(len(c) > 1 and not c[-1].users for c in chains):
        return
    readers = [user for user in whole.users if user is not split]
    done = max(chain[-1] for chain in chains)
    if any(reader < done for reader in readers):
        return
    ends = []
    for chain in chains:
        last = chain[0]
        for write in chain[1:]:
            write.target = _out_of_place(write.target)
            write.replace_input_with(arguments(write)[0], last)
            last = _as_written(write, last)
        ends.append(last)
    axis = arguments(split)[2] if len(split.args) > 2 else 0
    with split.graph.inserting_after(max(done, *ends)):
        filled = split.graph.call_function(aten.cat.default, (ends, axis))
    filled.meta = dict(whole.meta)
    whole.replace_all_uses_with(filled, lambda user: user in readers)


def _written_in_turn(part: Node) -> list[Node]:
    """Return a part and the chain of in-place operations that are its only readers."""
    chain = [part]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        fills = written_by(user) == [chain[-1]] and user.args[0] is chain[-1]
        if not fills or _is_of_the_name_alone(user.target) or not _out_of_place(user.target):
            break
        chain.append(user)
    return chain


# -- all writes at once -----------------------------------------------------------------------


class _OriginCopier(Interpreter):
    """Runs a graph node by node, and gives each new node the origin of the old one."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.names: dict[str, str] = {}  # of the new node in the place of an old one

    def run_node(self, node: Node) -> Any:
        """Run one node."""
        mode: Any = get_proxy_mode()
        last: Node = mode.tracer.graph._root.prev
        result = super().run_node(node)
        for new in nodes_after(last):
            copy_origin(new, node)
            self.names[node.name] = new.name
        return result


def _spell_out_views(graph: Graph) -> None:
    """Write views so that torch can write through them without arithmetic."""
    for node in list(graph.nodes):
        node.target = SILENT_VIEWS.get(node.target, node.target)
        if node.target is not aten.expand.default:
            continue
        source = node.all_input_nodes[0]
        added = node.meta["val"].ndim - source.meta["val"].ndim
        if node.meta["val"].numel() != source.meta["val"].numel():
            continue  # only read: a write through it has been refused
        view = source
        with graph.inserting_before(node):
            for _ in range(added):
                view = graph.call_function(aten.unsqueeze.default, (view, 0))
                copy_origin(view, node)
            if not added:  # a name of its own, which may come to look otherwise
                view = graph.call_function(aten.alias.default, (source,))
                copy_origin(view, node)
        view.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(view)
        graph.erase_node(node)


def _functionalized(module: GraphModule) -> GraphModule:
    """Let torch write all operations out of place, views of what they write included."""
    inputs = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
    run = _OriginCopier(module)

    def flat(*leaves: Tensor) -> Any:
        return run.run(*leaves, enable_io_processing=False)

    try:
        with _use_lazy_graph_module(True):
            result = make_fx(torch.func.functionalize(flat), _allow_non_fake_inputs=True)(*inputs)
    except (RuntimeError, NotImplementedError) as error:
        raise ValueError(
            f"trace expects in-place operations that torch can write out of place: {error}"
        ) from error
    for node in result.graph.nodes:
        origin = origin_of(node)
        if origin.forward:
            set_origin(node, origin._replace(forward=run.names.get(origin.forward, "")))
    _return_inputs(module.graph, result.graph)
    for node in result.graph.nodes:
        into_input = node.target is aten.copy_.default and arguments(node)[0].op == "placeholder"
        if writes(node) and not into_input:
            raise ValueError(
                f"trace expects in-place operations that torch can write out of place, got "
                f"{node.target}."
            )
    result.graph.set_codegen(module.graph._codegen)
    return result


def _return_inputs(old: Graph, new: Graph) -> None:
    """Return the input itself where the function returned one that it had written into."""
    places = (graph.find_nodes(op="placeholder") for graph in (old, new))
    inputs = dict(zip(*places, strict=True))

    def returned(result: Any, before: Any) -> Any:
        while isinstance(before, Node) and len(written_by(before)) == 1:
            (before,) = written_by(before)
        return inputs.get(before, result)

    output = new.output_node()
    output.args = (pytree.tree_map(returned, output.args[0], old.output_node().args[0]),)
