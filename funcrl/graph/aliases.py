"""Which values of a graph share memory, and which nodes write into it.

All of it is read from the schemas of the operators: `add_(Tensor(a!) self, ...)` writes into its
argument, `t(Tensor(a) self) -> Tensor(a)` gives a view of it. What a schema does not say is listed
here, and nowhere else.
"""

import operator
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx
from torch.fx import Node

# They share memory though their schemas do not say so, for autograd is not to see views; and the
# operators that do the same and say so.
aten = torch.ops.aten
SILENT_VIEWS = {
    aten._unsafe_view.default: aten.view.default,
    aten.unsafe_split.Tensor: aten.split.Tensor,
    aten.unsafe_split_with_sizes.default: aten.split_with_sizes.default,
}
# CUDA's caching allocator hands out multiples of this.
_CUDA_BLOCK = 512


class Storages(NamedTuple):
    """The storage of each value of a graph; views and in-place results share one."""

    of: dict[Node, tuple[int, ...]]  # one storage for each tensor of a node's value
    num_bytes: list[int]  # of each storage
    written: dict[int, int]  # of storages that nodes write into: the place of the first of these


class Sharing:
    """The storages of the nodes that were added, in the order of the graph."""

    def __init__(self) -> None:
        self.of: dict[Node, tuple[int, ...]] = {}  # one storage for each tensor of a node's value
        self.members: list[list[Node]] = []  # of each storage: who allocates it, then its views

    def add(self, node: Node, count: int = 1) -> None:
        """Add a node whose value is `count` tensors, or one."""
        found = []
        for shared in _shared_with(node, count, self.of):
            if shared is None:
                shared = len(self.members)
                self.members.append([])
            self.members[shared].append(node)
            found.append(shared)
        self.of[node] = tuple(found)


def find_storages(gm: fx.GraphModule) -> Storages:
    """Return the storages of a graph's values, as the schemas of its operators say."""
    sharing = Sharing()
    num_bytes: list[int] = []
    written: dict[int, int] = {}
    for place, node in enumerate(gm.graph.nodes):
        values = [] if node.op == "output" else _tensors(gm, node)
        sharing.add(node, len(values))
        for storage, value in zip(sharing.of[node], values, strict=True):
            if storage == len(num_bytes):
                num_bytes.append(_size(node, value))
        for storage in (each for read in written_by(node) for each in sharing.of[read]):
            written.setdefault(storage, place)
    return Storages(sharing.of, num_bytes, written)


def is_view(node: Node) -> bool:
    """Return whether the node's value is a view of an argument's memory.

    A part of a list of values, such as those of a split, counts as a view of the list.
    """
    return node.target is operator.getitem or gives_view(node.target)


def gives_view(target: Any) -> bool:
    """Return whether an operator's result is a view of an argument, without writing into it."""
    return isinstance(target, torch._ops.OpOverload) and _schema_gives_view(target)


@cache  # of a hundred operators, each of which is asked about for thousands of nodes
def _schema_gives_view(target: torch._ops.OpOverload[Any, Any]) -> bool:
    if target._schema.is_mutable:
        return False
    # A result that may be new memory, such as that of `aten.to`, is one that may be a view.
    return target in SILENT_VIEWS or any(
        _may_share(argument.alias_info, result.alias_info)
        for argument in target._schema.arguments
        for result in target._schema.returns
    )


def writes(node: Node) -> bool:
    """Return whether the node changes one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_by(node: Node) -> list[Node]:
    """Return the arguments that a node writes into."""
    if not writes(node):
        return []
    return [
        read
        for argument, nodes in _arguments(node)
        if argument.alias_info is not None and argument.alias_info.is_write
        for read in nodes
    ]


def written_inputs(graph: fx.Graph) -> set[int]:
    """Return the indices of the inputs that a graph writes into."""
    targets = {target for node in graph.nodes for target in written_by(node)}
    inputs = graph.find_nodes(op="placeholder")
    return {index for index, node in enumerate(inputs) if node in targets}


def sharing_places(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of the tensors that share memory, a list for each piece of memory."""
    places: dict[int, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    return [group for group in places.values() if len(group) > 1]


def overlap(first: Tensor, second: Tensor) -> bool:
    """Return whether two views of one storage share some bytes.

    An axis along which both step alike, by more than all that the others span, is left out: it
    cannot make bytes meet that do not meet within one step. Few bytes are left of slices of one
    tensor.
    """
    if not (first.numel() and second.numel()):
        return False
    starts = [int(each.storage_offset()) * each.element_size() for each in (first, second)]
    axes = [_byte_axes(each) for each in (first, second)]
    while axes[0] and axes[1] and axes[0][0] == axes[1][0]:
        inner = [each[1:] for each in axes]
        ends = [
            start + sum(stride * (size - 1) for stride, size in rest)
            for start, rest in zip(starts, inner, strict=True)
        ]
        if axes[0][0][0] <= max(ends) - min(starts):
            break
        axes = inner
    return not _places(starts[0], axes[0]).isdisjoint(_places(starts[1], axes[1]))


def looks_alike(first: Tensor, second: Tensor) -> bool:
    """Return whether two views of one storage are the same view of it."""

    def look(tensor: Tensor) -> tuple[Any, ...]:
        place = (tensor.shape, tensor.stride(), tensor.storage_offset())
        return (*place, tensor.dtype, tensor.is_conj(), tensor.is_neg())

    return look(first) == look(second)


def overlaps_itself(tensor: Tensor) -> bool:
    """Return whether two elements of a tensor share memory, as in an expanded tensor."""
    axes = sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    reach = 0  # of the axes with shorter steps
    for stride, size in axes if tensor.numel() else ():
        if stride <= reach:
            places = _places(0, axes)
            return len(places) < tensor.numel()
        reach += stride * (size - 1)
    return False


def _byte_axes(tensor: Tensor) -> list[tuple[int, int]]:
    """Return each axis' stride in bytes and its size, the largest stride first."""
    width = tensor.element_size()
    steps = [stride * width for stride in tensor.stride()]
    axes = [*zip(steps, tensor.shape, strict=True), (1, width)]
    return sorted(((step, size) for step, size in axes if step and size > 1), reverse=True)


def _places(start: int, axes: Sequence[tuple[int, int]]) -> set[int]:
    """Return the places that nested axes (stride, size) reach from a start."""
    places = {start}
    for stride, size in axes:
        places = {place + stride * index for place in places for index in range(size)}
    return places


def _tensors(gm: fx.GraphModule, node: Node) -> list[Tensor | None]:
    """Return the example tensors of a node; None in the place of what is no tensor."""
    if node.op == "get_attr" and "val" not in node.meta:
        value: Any = operator.attrgetter(str(node.target))(gm)
    elif "val" in node.meta or not node.users:
        value = node.meta.get("val")
    else:
        raise ValueError(
            f"predict_peak expects node.meta['val'] on every node, as make_fx leaves it, "
            f"got none on {node.name!r}."
        )
    values = value if isinstance(value, list | tuple) else [value]
    return [value if isinstance(value, Tensor) else None for value in values]


def _size(node: Node, value: Tensor | None) -> int:
    """Return the bytes that a new value takes, or all of the storage that an input is a part of."""
    if value is None:
        return 0
    num_bytes = value.numel() * value.element_size()
    if node.op in ("placeholder", "get_attr"):
        num_bytes = value.untyped_storage().nbytes()
    if value.device.type == "cuda":
        return -(-num_bytes // _CUDA_BLOCK) * _CUDA_BLOCK
    return num_bytes


def _shared_with(node: Node, count: int, of: dict[Node, tuple[int, ...]]) -> list[int | None]:
    """Return, for each tensor of a node's value, the storage that it shares, None if it is new."""
    if node.target is operator.getitem:
        source, index = node.args
        return [of[source][index]]  # type: ignore[index]  # (a node and an integer)
    if not isinstance(node.target, torch._ops.OpOverload):
        return [None] * count
    if node.target in SILENT_VIEWS:
        return [of[node.all_input_nodes[0]][0]] * count
    shared: list[int | None] = []
    for result in node.target._schema.returns:
        # A list of tensors is one result in the schema, and then the only one.
        places = count if isinstance(result.type, torch.ListType) else 1
        sources = [
            storage
            for argument, nodes in _arguments(node)
            if _may_share(argument.alias_info, result.alias_info)
            for read in nodes
            for storage in of[read]
        ]
        shared += (sources if len(sources) == places else sources[:1] * places) or [None] * places
    return (shared + [None] * count)[:count]


def _may_share(argument: Any, result: Any) -> bool:
    """Return whether a schema says that a result is a view of an argument."""
    if argument is None or result is None:
        return False
    # A list of views has no name of its own: its argument is the one that becomes `*`.
    return bool(argument.before_set & result.before_set) or (
        not result.before_set and "*" in argument.after_set
    )


def _arguments(node: Node) -> list[tuple[Any, list[Node]]]:
    """Return each argument of the op's schema with the nodes that are passed for it."""
    found = []
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]  # (an OpOverload)
        passed = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        passed = passed if isinstance(passed, list | tuple) else [passed]
        found.append((argument, [item for item in passed if isinstance(item, Node)]))
    return found
