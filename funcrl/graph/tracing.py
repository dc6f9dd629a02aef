"""A pure function as one flat graph of aten operations, each with its origin, cleaned of writes."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.fx import GraphModule, Node
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from funcrl.core.arguments import checked
from funcrl.core.unbatched import reads_a_value, value_was_read
from funcrl.graph.aliases import is_view, looks_alike, sharing_places, written_inputs
from funcrl.graph.grouped_mm import traceable
from funcrl.graph.in_place import without_writes
from funcrl.graph.nodes import (
    Origin,
    Phase,
    is_late,
    layer_of,
    nodes_after,
    origin_of,
    recorded_origin,
    set_origin,
)
from funcrl.graph.repeats import Repeats


@contextmanager
def without_collection() -> Iterator[None]:
    """Run a block, or a function that this decorates, without a search for reference cycles.

    A step's graph is a million objects, all of them alive: Python would look through them again
    and again, for a quarter of the time that a trace takes, and free nothing. Python has one such
    search for the whole process: other threads go without it meanwhile.

    Example:
        >>> import gc
        >>> from funcrl.graph.tracing import without_collection
        >>> with without_collection():
        ...     paused = gc.isenabled()
        >>> paused, gc.isenabled()
        (False, True)
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


aten = torch.ops.aten


def clean(module: GraphModule) -> GraphModule:
    """Return the traced graph without in-place operations, dead nodes and needless views.

    A copy into an input stays: it is what the function does to its arguments. Views are shared
    within a micro-batch only: shared further, they would keep a tensor alive for all of them.
    """
    module = without_writes(module)
    views: dict[tuple[Any, str, int], Node] = {}
    for node in module.graph.nodes:
        if is_view(node):
            key = (node.target, f"{node.args} {node.kwargs}", origin_of(node).microbatch)
            first = views.setdefault(key, node)
            (source,) = node.all_input_nodes
            node.replace_all_uses_with(source if _same(node, source) else first)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return module


def look_through(node: Node) -> Node:
    """Return the node that a chain of views and casts starts from."""
    while (is_view(node) or node.target is aten._to_copy.default) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _same(node: Node, source: Node) -> bool:
    """Return whether a view has the shape, strides and dtype of its source."""
    new, old = node.meta.get("val"), source.meta.get("val")
    return isinstance(new, Tensor) and isinstance(old, Tensor) and looks_alike(new, old)


# Asked for thousands of times.
_NO_NODES: dict[Any, Callable[..., Any]] = {
    torch.ops.prim.device.default: lambda tensor: tensor.device,
    aten.promote_types.default: cache(torch.promote_types),
}


@checked
@without_collection()
def trace(fn: Callable[..., Any], *args: Any) -> GraphModule:
    """Return `fn` as one flat graph that takes and returns the same trees of tensors.

    A whole step is such a function, `trace(step.update, state, batch)`: forward, loss, backward
    and optimizer. Nothing is computed while it is traced, so no memory is needed for it. Shapes
    and dtypes are fixed to those of the arguments; every tensor in them is an input, whereas
    tensors that `fn` holds itself (a reference model's parameters) become constants by reference.
    The graph has no in-place operation but those that write into an argument (`funcrl.donate`),
    and it is run under `torch.no_grad()`: it already holds the backward pass.

    Args:
        fn: a function of trees of tensors.
        args: its arguments, or others of their shapes.

    Example:
        >>> import torch, funcrl
        >>> graph = funcrl.trace(lambda x: {"y": (x["a"] * 2).sum()}, {"a": torch.ones(3)})
        >>> [node.name for node in graph.graph.nodes]
        ['arg0_1', 'mul', 'sum_1', 'output']
        >>> graph({"a": torch.tensor([1.0, 2.0, 3.0])})
        {'y': tensor(12.)}
    """
    paths = _input_paths(args)
    args = _without_repeats(args)
    recorder = _Recorder()

    def recorded(*inputs: Any) -> Any:
        with recorder.recording():
            return fn(*inputs)

    try:
        # No code is written for a graph that passes go on to change (`nodes.as_module`), and
        # the names of Python functions, which torch would collect, are not read.
        with torch.no_grad(), _use_lazy_graph_module(True):
            traced = make_fx(
                recorded,
                tracing_mode="fake",
                _allow_non_fake_inputs=True,
                _disable_torch_fn_metadata_mode=True,
            )(*args)
    except RuntimeError as error:
        if reads_a_value(error):
            raise value_was_read("trace", "a function", error) from error
        raise
    graph = clean(traced)
    _check_own_memory(graph, args, paths)
    _complete(graph, paths, recorder)
    return graph


def _has_no_value(tensor: Tensor) -> bool:
    """Return whether a tensor of a trace stands for any values, unlike a constant."""
    return isinstance(tensor, FakeTensor) and tensor.constant is None


class _Recorder(TorchDispatchMode):
    """Records the origin of each operation as it becomes a node, below autograd and vmap."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # (torch's own)
        self.parameters: dict[str, str] = {}  # every parameter's path: its module's path
        self._names: dict[int, str] = {}  # of modules that are running
        self._stack: list[str] = []
        self._forward: dict[int, Node] = {}  # by autograd's sequence number
        self._numbers: dict[int, int] = {}  # of each thread: the last sequence number
        self._microbatch = 0
        self._last_backward: Node | None = None  # of this micro-batch

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while `make_fx` runs, and remove the module hooks afterwards."""
        self._thread = get_ident()
        mode: Any = get_proxy_mode()
        self._graph: torch.fx.Graph = mode.tracer.graph
        self._repeats = Repeats(mode)
        hooks = (
            nn.modules.module.register_module_forward_pre_hook(self._enter),
            nn.modules.module.register_module_forward_hook(self._leave, always_call=True),
        )
        try:
            with self:
                yield
        finally:
            for hook in hooks:
                hook.remove()
            del self._graph, self._repeats

    def _enter(self, module: nn.Module, _: Any) -> None:
        if get_ident() != self._thread:
            return  # torch calls these hooks in every thread, one that draws meanwhile too
        if not self._stack:
            self._names = {id(child): path for path, child in module.named_modules()}
            names = (name for name, _ in module.named_parameters(remove_duplicate=False))
            self.parameters |= {name: name.rpartition(".")[0] for name in names}
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))

    def _leave(self, *_: Any) -> None:
        if get_ident() == self._thread:
            self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and set the origin of the nodes that it adds."""
        if func in _NO_NODES:
            return _NO_NODES[func](*args)
        if func is aten._local_scalar_dense.default and _has_no_value(args[0]):
            raise DataDependentOutputException(func)  # a symbol would travel on
        last = self._graph._root.prev
        result = self._repeats.run(traceable(func, args), args, kwargs or {})
        added = nodes_after(last)
        origin = self._origin(added)
        for node in added:
            set_origin(node, origin)
        return result

    def _origin(self, added: list[Node]) -> Origin:
        current: Any = torch._C._current_autograd_node()  # None outside a backward pass
        # Autograd numbers an operation's record before the operation gets here, and each thread
        # counts for itself: a backward pass on a GPU is in another.
        number, thread = torch._C._autograd._get_sequence_nr() - 1, get_ident()
        recorded = number > self._numbers.get(thread, -1)
        self._numbers[thread] = number
        if current is not None:
            forward = self._forward.get(current._sequence_nr())
            if added:
                self._mark_seed(added[0])
                self._last_backward = added[-1]
            return Origin("backward", self._microbatch, forward=forward.name if forward else "")
        for node in reversed(added):
            # One record may be of several operations, such as a view and a product: the product
            # says more.
            if number not in self._forward or is_view(self._forward[number]):
                self._forward[number] = node
        if recorded and self._last_backward is not None:
            self._begin_microbatch(self._last_backward)
        phase: Phase = "forward" if self._last_backward is None else "optimizer"
        return Origin(phase, self._microbatch, module=self._stack[-1] if self._stack else "")

    def _mark_seed(self, first: Node) -> None:
        """Mark the seed of a backward pass: the node just before the first one, which reads it."""
        if self._last_backward is None and first.prev in first.all_input_nodes:
            set_origin(first.prev, Origin("backward", self._microbatch, is_seed=True))

    def _begin_microbatch(self, last_backward: Node) -> None:
        """Begin the next micro-batch, with all that came after the last backward pass."""
        self._microbatch, self._last_backward = self._microbatch + 1, None
        for node in nodes_after(last_backward):
            if not any(is_late(read) for read in node.all_input_nodes):
                origin = origin_of(node)._replace(phase="forward", microbatch=self._microbatch)
                set_origin(node, origin)


def _input_paths(args: tuple[Any, ...]) -> list[str]:
    """Return the path of each leaf in the arguments, and refuse leaves that are no tensors."""
    paths = []
    for keys, leaf in pytree.tree_flatten_with_path(args)[0]:
        path = ".".join(_key(key) for key in keys)
        if not isinstance(leaf, Tensor):
            raise TypeError(
                f"trace expects tensors in its arguments, got {leaf!r} at {path!r}: it would "
                f"become a constant; torch.tensor(...) makes it an input."
            )
        paths.append(path)
    return paths


def _check_own_memory(graph: GraphModule, args: tuple[Any, ...], paths: list[str]) -> None:
    """Refuse a function that writes into an argument whose memory another argument shares."""
    written = written_inputs(graph.graph)
    for places in sharing_places(pytree.tree_leaves(args)):
        if not written.isdisjoint(places):
            first, second = (paths[place] for place in places[:2])
            raise ValueError(
                f"trace expects arguments with memory of their own where the function writes into "
                f"them, got one piece for {first!r} and {second!r}."
            )


def _without_repeats(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments with an alias for each repeated tensor, so that each is an input."""
    seen: set[int] = set()

    def own(leaf: Tensor) -> Tensor:
        if id(leaf) in seen:
            return leaf.detach().requires_grad_(leaf.requires_grad)
        seen.add(id(leaf))
        return leaf

    distinct: tuple[Any, ...] = pytree.tree_map(own, args)
    return distinct


def _key(key: Any) -> str:
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return str(getattr(key, name))
    return str(key)


def _complete(module: GraphModule, paths: list[str], recorder: _Recorder) -> None:
    """Complete the origins with what follows from the graph: paths, modules and layers."""
    inputs = iter(paths)
    owners: dict[Node, str] = {}
    found: dict[str, Origin] = {}
    computed: set[Node] = set()  # by modules, or from what they computed, such as the loss
    for node in module.graph.nodes:
        origin = recorded_origin(node)
        if node.op == "placeholder":
            path = next(inputs)
            owner = _owner(path, recorder.parameters)
            owners |= {} if owner is None else {node: owner}
            origin = Origin("input", layer=layer_of(owner or ""), path=path)
        elif node.op == "output":
            origin = Origin("output")
        else:
            if origin.module or not computed.isdisjoint(node.all_input_nodes):
                computed.add(node)
            name = _module(node, origin, owners, found)
            outside = origin.phase == "forward" and node in computed
            layer = layer_of(name) if name or outside else _shared_layer(node, origin.phase)
            origin = origin._replace(module=name, layer=layer)
        found[node.name] = origin
        set_origin(node, origin)


def _owner(path: str, parameters: dict[str, str]) -> str | None:
    """Return the module of the parameter whose value or moment an input is."""
    names = [name for name in parameters if f".{name}." in f".{path}."]
    return parameters[max(names, key=len)] if names else None


def _module(node: Node, origin: Origin, owners: dict[Node, str], found: dict[str, Origin]) -> str:
    """Return the module: a product's is that of the parameter that it reads, a backward node's
    that of its forward node."""
    if origin.forward in found:
        return found[origin.forward].module
    name = origin.module
    if origin.phase == "forward" and node.op == "call_function":
        for source in node.all_input_nodes:
            owner = owners.get(look_through(source))
            # A module may read the parameters of those in it.
            if owner is not None and (not name or owner.startswith(f"{name}.")):
                return owner
    return name


def _shared_layer(node: Node, phase: Phase) -> str:
    """Return the layer that all a node of no module reads is of, such as a sum of gradients.

    To an optimizer all of whose other arguments are of a layer, such as a learning rate, it does
    not matter what is of none.
    """
    late = phase == "optimizer"
    reads = [read for read in node.all_input_nodes if late or read.all_input_nodes]
    layers = {origin_of(read).layer for read in reads} - ({""} if late else set())
    return layers.pop() if len(layers) == 1 else ""
