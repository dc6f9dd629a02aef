"""Operations like earlier ones, written into a trace without torch's work for each of them.

A step of 28 layers runs the same operations on tensors of the same shapes 28 times, and an
optimizer runs its formula on each of 310 parameters. Torch works out anew, in Python, what each of
them returns: most of the time that a trace takes. Here the first of a kind is left to torch; from
then on its result is known, and only its node is written.
"""

from functools import cache
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.fx import Graph, Node, Proxy
from torch.fx.experimental.proxy_tensor import _ProxyTensor

from funcrl.graph.nodes import nodes_after

Arguments: TypeAlias = tuple[Any, ...]
_OTHERS = {
    torch.Tag.data_dependent_output,
    torch.Tag.dynamic_output_shape,
    torch.Tag.nondeterministic_seeded,
    torch.Tag.inplace_view,
}
_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, str, type(None))


class _Known(NamedTuple):
    """What an operation returned for arguments of some shapes."""

    node: Node  # of the first operation of this kind
    view_of: int | None = None  # the argument whose memory the result shares
    written: int | None = None  # the argument that is written into, and is the result


class _UnknownError(Exception):
    """An argument is of a kind whose operations are left to torch."""


class Repeats:
    """Runs operations under `make_fx`, and writes down those that it has seen before."""

    def __init__(self, mode: Any) -> None:
        self._tracer = mode.tracer
        self._graph: Graph = mode.tracer.graph
        self._known: dict[Arguments, _Known] = {}
        self._layouts: dict[Arguments, int] = {}  # numbers them: a short key of a tensor
        self._layout_of: dict[Node, int] = {}

    def run(self, operation: Any, args: Arguments, kwargs: dict[str, Any]) -> Any:
        """Return what the operation gives, and add its nodes to the graph."""
        try:
            key, nodes = self._read(operation, args, kwargs)
        except _UnknownError:
            return operation(*args, **kwargs)
        known = self._known.get(key)
        if known is not None:
            return self._written(known, args, nodes)
        last = self._graph._root.prev
        result = operation(*args, **kwargs)
        added = nodes_after(last)
        if type(result) is FakeTensor and [node.target for node in added] == [operation]:
            self._learn(key, added[0], args, result)
        return result

    def _read(
        self, operation: Any, args: Arguments, kwargs: dict[str, Any]
    ) -> tuple[Arguments, tuple[Arguments, dict[str, Any]]]:
        """Return the key of an operation on such arguments, and the arguments of its node."""
        if not _is_plain(operation):
            raise _UnknownError
        keys: list[Any] = [operation, torch.get_default_dtype()]
        nodes = tuple(self._argument(value, keys) for value in args)
        options = {}
        for name, value in kwargs.items():
            keys.append(name)
            options[name] = self._argument(value, keys)
        return tuple(keys), (nodes, options)

    def _argument(self, value: Any, keys: list[Any]) -> Any:
        """Return an argument with nodes in place of tensors, and add what it looks like to keys."""
        if isinstance(value, Tensor):
            tracked = self._tracer.tensor_tracker.get(value)
            if tracked is None or tracked.constant is not None:
                raise _UnknownError
            node: Node = tracked.proxy.node
            keys.append(self._layout(node))
            return node
        keys.append(type(value))  # 1, 1.0 and True are equal, and give other dtypes
        if isinstance(value, list | tuple):
            keys.append(len(value))
            return type(value)(self._argument(each, keys) for each in value)
        if type(value) not in (int, float, bool) and not isinstance(value, _VALUES):
            raise _UnknownError
        keys.append(value)
        return value

    def _layout(self, node: Node) -> int:
        """Return the number of a layout: equal for tensors of equal shape, strides and dtype."""
        number = self._layout_of.get(node)
        if number is None:
            value = node.meta.get("val")
            if type(value) is not FakeTensor or value.layout is not torch.strided:
                raise _UnknownError
            if value.constant is not None or value.is_conj() or value.is_neg():
                raise _UnknownError
            places = (value.shape, value.stride(), value.storage_offset())
            layout = (*places, value.dtype, value.device)
            number = self._layouts.setdefault(layout, len(self._layouts))
            self._layout_of[node] = number
        return number

    def _learn(self, key: Arguments, node: Node, args: Arguments, result: FakeTensor) -> None:
        """Remember what an operation gave: new memory, that of one argument, or an argument."""
        tracked = self._tracer.tensor_tracker.get(result)
        if tracked is None or tracked.proxy.node is not node or tracked.constant is not None:
            return
        try:
            self._layout(node)
        except _UnknownError:
            return
        memory = result.untyped_storage()._cdata
        tensors = [(place, value) for place, value in enumerate(args) if isinstance(value, Tensor)]
        shares = [place for place, value in tensors if value.untyped_storage()._cdata == memory]
        same = [place for place, value in tensors if value is result]
        if not shares:
            self._known[key] = _Known(node)
        elif shares == same[:1]:
            self._known[key] = _Known(node, written=same[0])
        elif len(shares) == 1:
            self._known[key] = _Known(node, view_of=shares[0])

    def _written(
        self, known: _Known, args: Arguments, nodes: tuple[Arguments, dict[str, Any]]
    ) -> FakeTensor:
        """Write the node of an operation that is known, and return its result."""
        first = known.node
        operation: Any = first.target
        name = self._graph._target_to_str(operation.overloadpacket.__name__)
        node = self._graph.create_node("call_function", operation, *nodes, name=name)
        node.meta = {name: first.meta[name] for name in ("val", "tensor_meta")}
        self._layout_of[node] = self._layout_of[first]
        if known.written is not None:
            result = args[known.written]
        else:
            result = _tensor_like(first.meta["val"], known.view_of, args)
        self._tracer.tensor_tracker[result] = _ProxyTensor(Proxy(node, self._tracer), None)
        return result


def _tensor_like(like: FakeTensor, view_of: int | None, args: Arguments) -> FakeTensor:
    """Return a tensor without data that looks like another, in the memory of an argument if any."""
    shape, strides = like.shape, like.stride()
    with in_kernel_invocation_manager(like.fake_mode):
        data = torch.empty_strided(shape, strides, dtype=like.dtype, device="meta")
        if view_of is not None:
            memory = args[view_of].untyped_storage()
            data.set_(memory, like.storage_offset(), shape, strides)
    # On a GPU it allocates an element of its own, which is no operation of the function.
    with torch._C._DisableTorchDispatch():
        return FakeTensor(like.fake_mode, data, like.device)


@cache
def _is_plain(operation: Any) -> bool:
    """Return whether an operation's result depends on shapes and dtypes alone.

    It may write into its first argument, and return that, or into none.
    """
    if not isinstance(operation, torch._ops.OpOverload) or operation.namespace != "aten":
        return False
    written = [
        place
        for place, argument in enumerate(operation._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return written in ([], [0]) and _OTHERS.isdisjoint(operation.tags)
