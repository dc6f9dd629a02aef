"""How many bytes a flat graph keeps alive, node by node, before it is ever run.

A graph runs one node after the other and frees a tensor after the last node that reads it. Its
inputs belong to the caller and its outputs go there, so both stay. What one op allocates for itself
while it runs is in no graph: the prediction knows nothing of such workspace.
"""

import operator
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

# It shares memory though its schema does not say so: autograd is not to see it as a view.
_SILENT_VIEWS = (torch.ops.aten._unsafe_view.default,)
# CUDA's caching allocator hands out multiples of this.
_CUDA_BLOCK = 512


class Storages(NamedTuple):
    """Where the values of a graph live; views and in-place results share a storage."""

    of: dict[fx.Node, tuple[int, ...]]  # one storage for each tensor of a node's value
    num_bytes: list[int]  # of each storage
    written: set[int]  # the storages that some node writes into


def predict_peak(gm: fx.GraphModule) -> int:
    """Return the most bytes alive at once while a graph runs, its inputs and outputs included.

    Args:
        gm: a flat graph of ATen and custom ops with `node.meta["val"]`, as `make_fx` leaves it.

    Example:
        >>> import torch, funcrl
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1).exp().sum())(torch.zeros(100))
        >>> funcrl.graph.predict_peak(gm)  # x, x + 1 and its exponential, 400 bytes each
        1200
    """
    return max(live_bytes(gm))


def live_bytes(gm: fx.GraphModule) -> list[int]:
    """Return the bytes alive while each node runs, in the order of `gm.graph.nodes`.

    Args:
        gm: a flat graph of ATen and custom ops with `node.meta["val"]`.

    Example:
        >>> import torch, funcrl
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1).exp().sum())(torch.zeros(100))
        >>> funcrl.graph.live_bytes(gm)  # x, add, exp, sum, output
        [400, 800, 1200, 804, 404]
    """
    storages = find_storages(gm)
    end = len(gm.graph.nodes) - 1
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, node in enumerate(gm.graph.nodes):
        stays = node.op in ("placeholder", "get_attr")
        for storage in storages.of[node]:
            first.setdefault(storage, 0 if stays else place)
        for touched in (node, *node.all_input_nodes):
            for storage in storages.of[touched]:
                last[storage] = end if stays else max(place, last.get(storage, 0))
    changes = [0] * (end + 2)
    for storage, place in first.items():
        changes[place] += storages.num_bytes[storage]
        changes[last[storage] + 1] -= storages.num_bytes[storage]
    return list(accumulate(changes[:-1]))


def find_storages(gm: fx.GraphModule) -> Storages:
    """Return where the values of a graph live, as the schemas of its ops tell.

    Args:
        gm: a flat graph of ATen and custom ops with `node.meta["val"]`.

    Example:
        >>> import torch, funcrl
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: x.exp().t().neg_())(torch.zeros(2, 3))
        >>> storages = funcrl.graph.liveness.find_storages(gm)
        >>> list(storages.of.values()), storages.written  # x, exp, t, neg_, output
        ([(0,), (1,), (1,), (1,), ()], {1})
    """
    storages = Storages({}, [], set())
    for node in gm.graph.nodes:
        values = [] if node.op == "output" else _tensors(gm, node)
        shared = _shared_with(node, len(values), storages.of)
        found = []
        for value, same in zip(values, shared, strict=True):
            if same is None:
                same = len(storages.num_bytes)
                storages.num_bytes.append(_size(node, value))
            found.append(same)
        storages.of[node] = tuple(found)
        storages.written.update(_written(node, storages.of))
    return storages


def _tensors(gm: fx.GraphModule, node: fx.Node) -> list[Tensor | None]:
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


def _size(node: fx.Node, value: Tensor | None) -> int:
    """Return the bytes that a new value takes, or all of the storage that an input is a part of."""
    if value is None:
        return 0
    num_bytes = value.numel() * value.element_size()
    if node.op in ("placeholder", "get_attr"):
        num_bytes = value.untyped_storage().nbytes()
    if value.device.type == "cuda":
        return -(-num_bytes // _CUDA_BLOCK) * _CUDA_BLOCK
    return num_bytes


def _shared_with(node: fx.Node, count: int, of: dict[fx.Node, tuple[int, ...]]) -> list[int | None]:
    """Return, for each tensor of a node's value, the storage that it shares, None if it is new."""
    if node.target is operator.getitem:
        source, index = node.args
        return [of[source][index]]  # type: ignore[index]  # (a node and an integer)
    if not isinstance(node.target, torch._ops.OpOverload):
        return [None] * count
    if node.target in _SILENT_VIEWS:
        return list(of[node.all_input_nodes[0]])
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
    """Whether a schema says that a result looks at an argument's memory."""
    if argument is None or result is None:
        return False
    # A list of views has no name of its own: its argument is the one that becomes `*`.
    return bool(argument.before_set & result.before_set) or (
        not result.before_set and "*" in argument.after_set
    )


def _written(node: fx.Node, of: dict[fx.Node, tuple[int, ...]]) -> set[int]:
    if not isinstance(node.target, torch._ops.OpOverload):
        return set()
    return {
        storage
        for argument, nodes in _arguments(node)
        if argument.alias_info and argument.alias_info.is_write
        for read in nodes
        for storage in of[read]
    }


def _arguments(node: fx.Node) -> list[tuple[Any, list[fx.Node]]]:
    """Return each argument of the op's schema with the nodes that are passed for it."""
    found = []
    for place, argument in enumerate(node.target._schema.arguments):  # type: ignore[union-attr]  # (an OpOverload)
        passed = node.args[place] if place < len(node.args) else node.kwargs.get(argument.name)
        passed = passed if isinstance(passed, list | tuple) else [passed]
        found.append((argument, [item for item in passed if isinstance(item, fx.Node)]))
    return found
