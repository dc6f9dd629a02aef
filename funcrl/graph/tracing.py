"""A pure function as one flat graph of aten operations, each of which knows where it comes from.

Every node's `meta` holds, besides torch's `val` (a tensor without data):

    phase         "input", "forward", "backward", "optimizer" (what needs a gradient) or "output"
    module        the path of the module that it computes, such as "blocks.3.attention.q"
    forward_node  on a backward node, the name of the node that it differentiates
    path          on an input, where in the arguments it is, such as "0.params.norm.weight"

`module` and `forward_node` are absent where autograd and the modules say nothing.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from funcrl.core.arguments import checked
from funcrl.graph.aliases import is_view, written_by
from funcrl.graph.cleaning import clean, look_through
from funcrl.models.functional import reads_a_value

aten = torch.ops.aten
_READS_NOTHING = "trace expects a function that reads no tensor's value in Python (float(), if)"


@checked
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
    args = _told_apart(args)
    recorder = _Recorder()

    def recorded(*inputs: Any) -> Any:
        with recorder.recording():
            return fn(*inputs)

    try:
        with torch.no_grad():
            traced = make_fx(recorded, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    except RuntimeError as error:
        if reads_a_value(error):
            raise ValueError(f"{_READS_NOTHING}, got one that does: {error}") from error
        raise
    read = traced.graph.find_nodes(op="call_function", target=aten._local_scalar_dense.default)
    if read:
        raise ValueError(f"{_READS_NOTHING}, got one that reads {read[0].args[0]}.")
    graph = clean(traced)
    _check_own_memory(graph, args, paths)
    _describe(graph, paths, recorder)
    return graph


class _Recorder(TorchDispatchMode):
    """Sees each operation beneath autograd and vmap, just before it becomes a node."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # (torch's own)
        self.parameters: dict[str, str] = {}  # every parameter's path: its module's path
        self._names: dict[int, str] = {}  # of modules that are running
        self._stack: list[str] = []
        self._forward: dict[int, Node] = {}  # by autograd's sequence number

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record while `make_fx` runs; torch's module hooks are taken off again."""
        mode: Any = get_proxy_mode()
        self._graph: torch.fx.Graph = mode.tracer.graph
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
            del self._graph

    def _enter(self, module: nn.Module, _: Any) -> None:
        if not self._stack:
            self._names = {id(child): path for path, child in module.named_modules()}
            names = (name for name, _ in module.named_parameters(remove_duplicate=False))
            self.parameters |= {name: name.rpartition(".")[0] for name in names}
        self._stack.append(self._names.get(id(module), self._stack[-1] if self._stack else ""))

    def _leave(self, *_: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and describe the nodes that it adds."""
        last = _last(self._graph)
        result = func(*args, **(kwargs or {}))
        node = _last(self._graph)
        while node is not last:
            self._describe(node)
            node = node.prev
        return result

    def _describe(self, node: Node) -> None:
        current: Any = torch._C._current_autograd_node()  # None outside a backward pass
        if current is None:
            # Autograd numbers an operation's record before the operation gets here. One record may
            # be of several operations, such as a view and a product: the product says more.
            number = torch._C._autograd._get_sequence_nr() - 1
            if number not in self._forward or is_view(self._forward[number]):
                self._forward[number] = node
            if self._stack:
                node.meta["module"] = self._stack[-1]
            return
        node.meta["phase"] = "backward"
        if (forward := self._forward.get(current._sequence_nr())) is not None:
            node.meta["forward_node"] = forward.name


def _last(graph: torch.fx.Graph) -> Node:
    return graph._root.prev


def _input_paths(args: tuple[Any, ...]) -> list[str]:
    """Return where each leaf is in the arguments; only tensors are inputs of a graph."""
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
    """Refuse to write into an argument whose memory another one shares: the graph sees two."""
    inputs = graph.graph.find_nodes(op="placeholder")
    written = {target for node in graph.graph.nodes for target in written_by(node)}
    owners: dict[int, list[int]] = {}
    for place, leaf in enumerate(pytree.tree_leaves(args)):
        owners.setdefault(leaf.untyped_storage()._cdata, []).append(place)
    for places in owners.values():
        if len(places) > 1 and any(inputs[place] in written for place in places):
            first, second = (paths[place] for place in places[:2])
            raise ValueError(
                f"trace expects arguments with memory of their own where the function writes into "
                f"them, got one piece for {first!r} and {second!r}."
            )


def _told_apart(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the arguments without a tensor that comes twice, which would become one input."""
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


def _describe(module: GraphModule, paths: list[str], recorder: _Recorder) -> None:
    """Fill in what follows from the graph: inputs, what comes after the backward, modules."""
    modules = {node.name: node.meta.get("module") for node in module.graph.nodes}
    inputs = iter(paths)
    owners: dict[Node, str] = {}
    for node in module.graph.nodes:
        if node.op == "placeholder":
            node.meta |= {"phase": "input", "path": next(inputs)}
            owner = _owner(node.meta["path"], recorder.parameters)
            if owner is not None:
                owners[node] = owner
        elif node.op == "output":
            node.meta["phase"] = "output"
        elif node.meta.get("phase") != "backward":
            after = {source.meta.get("phase") for source in node.all_input_nodes}
            node.meta["phase"] = "optimizer" if after & {"backward", "optimizer"} else "forward"
        _name_module(node, owners, modules)


def _owner(path: str, parameters: dict[str, str]) -> str | None:
    """Return the module of the parameter that an input is, by the end of the input's path."""
    keys = path.split(".")
    for start in range(len(keys)):
        module = parameters.get(".".join(keys[start:]))
        if module is not None and "opt_state" not in keys[:start]:
            return module
    return None


def _name_module(node: Node, owners: dict[Node, str], modules: dict[str, str | None]) -> None:
    """Name a product after the parameter that it reads, and a backward node as its forward."""
    forward = node.meta.get("forward_node")
    if forward is not None and modules.get(forward):
        node.meta["module"] = modules[forward]
    if node.meta.get("phase") == "forward" and node.op == "call_function":
        for source in node.all_input_nodes:
            owner = owners.get(look_through(source))
            inside = node.meta.get("module")  # a module may read the parameters of those in it
            if owner is not None and (not inside or owner.startswith(f"{inside}.")):
                node.meta["module"] = modules[node.name] = owner
