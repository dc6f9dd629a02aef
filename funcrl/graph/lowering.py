"""Operations in Inductor's words, fences that keep its order, and the processes that compile."""

from collections.abc import Callable, Sequence
from itertools import islice, takewhile

import torch
from torch import Tensor, fx
from torch.fx import Graph, GraphModule, Node

from funcrl.config.generation import CompileConfig
from funcrl.core.arguments import checked
from funcrl.graph.aliases import Storages, find_storages
from funcrl.graph.nodes import (
    Writer,
    arguments,
    as_module,
    copied,
    is_late,
    origin_of,
    set_origin,
    shape_of,
)
from funcrl.ops.exact.embedding import embedding_gradient_op

aten = torch.ops.aten


def select_for_scatter(module: GraphModule) -> GraphModule:
    """Return the graph with each `scatter_add` to one place a row written as a `where`.

        x.scatter_add(-1, index[..., :1], source)  ->  where(arange(V) == index, x + source, x)

    The first is a kernel of its own that reads and writes all of x, logits for instance; the second
    is computed with what comes before and after it. The values are the same.
    """
    if not any(map(_is_one_a_row, _scatters(module.graph))):
        return module
    graph = copied(module.graph)
    for node in _scatters(graph):
        if _is_one_a_row(node):
            x, _, index, source = arguments(node)
            write = Writer(graph, node, node)
            places = write(aten.arange.default, shape_of(x).shape[-1], device=shape_of(x).device)
            chosen = write(aten.eq.Tensor, places, index)
            added = write(aten.add.Tensor, x, source)
            node.replace_all_uses_with(write(aten.where.self, chosen, added, x))
            graph.erase_node(node)
    return as_module(graph, module)


def _scatters(graph: Graph) -> list[Node]:
    return list(graph.find_nodes(op="call_function", target=aten.scatter_add.default))


def _is_one_a_row(node: Node) -> bool:
    x, axis, index, source = arguments(node)
    rows = (*shape_of(x).shape[:-1], 1)
    last = axis in (-1, shape_of(x).ndim - 1)
    return last and shape_of(index).shape == shape_of(source).shape == rows


def _is_half_on_gpu(rows: Tensor) -> bool:
    return rows.device.type == "cuda" and rows.dtype in (torch.bfloat16, torch.float16)


def embedding_by_kernel(
    module: GraphModule, takes: Callable[[Tensor], bool] = _is_half_on_gpu
) -> GraphModule:
    """Return the graph with the gradients of embeddings computed by the exact numerics' kernel.

    It sums a token's rows in float32 and rounds once, faster than what Inductor makes of torch's.
    """
    graph = copied(module.graph)
    target = aten.embedding_dense_backward.default
    for node in graph.find_nodes(op="call_function", target=target):
        rows, tokens, size, padding, by_frequency = arguments(node)
        if takes(shape_of(rows)) and padding < 0 and not by_frequency:
            write = Writer(graph, node, node)
            total = write(embedding_gradient_op, rows, tokens, size, 1)
            node.replace_all_uses_with(write.cast(total, shape_of(node).dtype))
            graph.erase_node(node)
    return as_module(graph, module)


def scalars_as_elements(module: GraphModule) -> list[int]:
    """Give each 0-d input on a CPU the shape [1], and return the indices of those inputs.

    torch.compile (2.11 to 2.14) takes a 0-d float64 tensor on a CPU for a Python number: it leaves
    out what is written into it, a learning rate for instance, and traces the program twice. One
    element of a vector is a tensor to it. The caller passes `leaf.view(1)`, which is the same
    memory; the graph's first nodes view it as it was.
    """
    found = []
    for index, node in enumerate(module.graph.find_nodes(op="placeholder")):
        value = shape_of(node)
        if isinstance(value, Tensor) and not value.ndim and value.device.type == "cpu":
            found.append(index)
            with module.graph.inserting_after(node):
                scalar = module.graph.call_function(aten.view.default, (node, []))
            scalar.meta = dict(node.meta)
            node.replace_all_uses_with(scalar, lambda user, scalar=scalar: user is not scalar)
            node.meta["val"] = value.view(1)
    module.recompile()
    return found


def start_workers(device: torch.device, config: CompileConfig) -> None:
    """Start the processes that compile kernels for a device, if a step is compiled for a GPU.

    They take seconds to start. Inductor starts them at its first kernel, and compiles one kernel
    after the other until they are there. Started before a step is traced, they wait for it.
    """
    if config.backend == "inductor" and device.type == "cuda":
        # Not at the top: it takes a second, which a step that is not compiled need not wait for.
        from torch._inductor.async_compile import maybe_warm_pool

        maybe_warm_pool()


@torch.library.custom_op("funcrl::fence", mutates_args=("kept",))
def _fence(kept: Sequence[Tensor], gradient: Tensor) -> None:
    """Do nothing; the claim to write fixes the place in the order."""


@_fence.register_fake
def _(kept: Sequence[Tensor], gradient: Tensor) -> None:
    """Return nothing."""


@checked
def add_fences(gm: fx.GraphModule) -> fx.GraphModule:
    """Return a graph in which nothing that `remat` computes again can run before its place.

    For Inductor. What runs node by node needs no fence, and a backend that copies instead of
    writing in place (aot_eager) would copy the kept values.

    Args:
        gm: a result of `remat`, after all other passes.

    Example:
        >>> import torch, funcrl
        >>> gm = funcrl.trace(torch.func.grad(lambda x: x.exp().sin().cos().sum()), torch.zeros(3))
        >>> gm = funcrl.remat(gm, lambda node: node.name == "sin")
        >>> [node.name for node in funcrl.graph.add_fences(gm).graph.nodes][4:9]
        ['sum_1', 'ones_like', 'expand', 'fence_default', 'sin_recomputed']
    """
    graph = fx.Graph()
    graph.set_codegen(gm.graph._codegen)
    copies: dict[fx.Node, fx.Node] = {}
    gradient: fx.Node | None = None
    nodes, storages = list(gm.graph.nodes), find_storages(gm)
    wholes = _wholes(nodes, storages)
    gradients = _gradients(gm.graph)
    for place, node in enumerate(nodes):
        if not node.meta.get("recomputed"):
            if node in gradients and isinstance(node.meta.get("val"), Tensor):
                gradient = node
        elif gradient is not None and not nodes[place - 1].meta.get("recomputed"):
            kept = _kept(nodes, place, storages, wholes)
            if kept:
                arguments = ([copies[read] for read in kept], copies[gradient])
                fence = graph.call_function(torch.ops.funcrl.fence.default, arguments)
                fence.meta["val"] = None
                set_origin(fence, origin_of(node))
        copies[node] = graph.node_copy(node, copies.__getitem__)
    return as_module(graph, gm)


def _gradients(graph: fx.Graph) -> set[fx.Node]:
    """Return what depends on the seed of a backward pass, or all of it if no seed was recorded."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if origin_of(node).is_seed or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found or {node for node in graph.nodes if is_late(node)}


def _wholes(nodes: list[fx.Node], storages: Storages) -> dict[int, fx.Node]:
    """Return, for each storage, the tensor that was allocated with it."""
    wholes: dict[int, fx.Node] = {}
    for node in nodes:
        if isinstance(node.meta.get("val"), Tensor):
            for storage in storages.of[node]:
                wholes.setdefault(storage, node)
    return wholes


def _kept(
    nodes: list[fx.Node], start: int, storages: Storages, wholes: dict[int, fx.Node]
) -> list[fx.Node]:
    """Return what the run of recomputed nodes reads of the forward pass's own values.

    Of a view the whole that it looks at: a part may have elements that share a place.
    """
    again = takewhile(lambda node: node.meta.get("recomputed"), islice(nodes, start, None))
    reads = {read for node in again for read in node.all_input_nodes}
    found = {
        wholes[storage]
        for read in reads
        if not read.meta.get("recomputed")
        for storage in storages.of[read]
        if storage in wholes
    }
    # The caller's tensors must not be written into, not even by claim.
    return sorted(
        node
        for node in found
        if node.op == "call_function" and not node.meta.get("recomputed") and node < nodes[start]
    )
