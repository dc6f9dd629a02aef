"""The pass that makes per-sample gradients cost what the batch's gradient costs."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from funcrl.core.arguments import checked
from funcrl.graph import per_sample_nodes
from funcrl.graph.nodes import Writer, as_module, copied, hoist, shape_of
from funcrl.graph.per_sample_nodes import PerSample, RowSum, Square, Symbol
from funcrl.graph.per_sample_terms import normalise, write_norm, write_sum

aten = torch.ops.aten


class _Use(NamedTuple):
    """A node whose value can be computed without the per-sample gradient that it reads."""

    node: Node
    of: Symbol
    write: Callable[[Writer], Node]  # the same value, made otherwise


@checked
def fuse_per_sample(module: GraphModule) -> GraphModule:
    """Return the graph with no per-sample gradient in it that is only summed, scaled or normed.

    In the graph of `vmap(grad(loss))` every weight has a gradient [B, P, Q], one outer product a
    token. Where such a gradient is only read by these, they are computed without it:

        sum over B                  one matmul over the B T rows; one scatter for an embedding
        norm of each sample         Gram products of [B, T, T], if the gradient is larger than
                                    what it is made of (else the gradient is the cheaper way)
        factor a sample, then sum   the same matmul with scaled rows
        sum over T, then over B     one sum (norms and biases)

    through transposes, casts, scalings, sums of gradients (a tied embedding), and products with
    matrices that all samples share (adapters). Anything else that reads the gradient, such as
    returning it, leaves it as it is: the pass never changes what is computed, only its rounding.

    Args:
        module: a graph from `funcrl.trace`; it is not changed, and returned where there is
            nothing to fuse.

    Example:
        >>> import torch, funcrl
        >>> def total(w, x):
        ...     loss_fn = lambda w, row: (row @ w).square().sum()
        ...     return funcrl.per_sample_grad(loss_fn)(w, x).sum(dim=0)
        >>> graph = funcrl.trace(total, torch.ones(4, 3), torch.ones(2, 5, 4))
        >>> fused = funcrl.fuse_per_sample(graph)
        >>> [node.meta["val"].ndim for node in graph.graph.find_nodes(
        ...     op="call_function", target=torch.ops.aten.bmm.default)]
        [3]
        >>> list(fused.graph.find_nodes(op="call_function", target=torch.ops.aten.bmm.default))
        []
    """
    graph = copied(module.graph)
    before = set(graph.nodes)
    symbols = per_sample_nodes.symbols(graph)
    uses = {use.node: use for node in graph.nodes if (use := _use(node, symbols)) is not None}
    if not uses:
        return module
    blocked = _blocked(graph, symbols, uses)
    moved = {*symbols, *uses}
    for use in uses.values():
        if not per_sample_nodes.roots_of(use.of) & blocked:
            source = per_sample_nodes.described_best(per_sample_nodes.roots_of(use.of))
            fused = use.write(Writer(graph, use.node, source))
            old, new = shape_of(use.node), shape_of(fused)
            assert (new.shape, new.dtype) == (old.shape, old.dtype), use.node
            use.node.replace_all_uses_with(fused)
    graph.eliminate_dead_code()
    # As soon as it can be computed: the operands of each gradient are freed one after the other.
    hoist(graph, {node for node in graph.nodes if node in moved or node not in before})
    return as_module(graph, module)


def _blocked(
    graph: torch.fx.Graph, symbols: dict[Node, Symbol], uses: dict[Node, _Use]
) -> set[Node]:
    """Return the products that something needs as they are: to fuse the rest saves nothing."""
    blocked: set[Node] = set()
    for node in graph.nodes:
        if node in symbols and not all(user in symbols or user in uses for user in node.users):
            blocked |= per_sample_nodes.roots_of(symbols[node])
    return blocked


def _use(node: Node, symbols: dict[Node, Symbol]) -> _Use | None:
    """Return the use that a node makes of a per-sample gradient, None if it is another one."""
    value, spelled = node.meta.get("val"), normalise(node)
    if not isinstance(value, Tensor) or spelled is None or spelled.kind not in ("sum", "norm"):
        return None
    source, axes, keep = spelled.operands
    symbol = symbols.get(source)
    of = symbol.of if isinstance(symbol, Square) else symbol
    # The first axis of rows is not that of the samples.
    if symbol is None or keep or (isinstance(of, PerSample) and of.layout == "rows"):
        return None
    if axes == (0,) and spelled.kind == "sum" and not isinstance(symbol, Square):
        return _Use(node, symbol, lambda write: _write_total(write, symbol, value))
    root = spelled.kind == "norm"
    every = axes == tuple(range(1, shape_of(source).ndim))
    if not every or not isinstance(of, PerSample) or root is isinstance(symbol, Square):
        return None
    return _Use(node, symbol, lambda write: write_norm(write, of.terms, root, value.dtype))


def _write_total(write: Writer, symbol: PerSample | RowSum, value: Tensor) -> Node:
    """Write the sum over samples, in the shape and dtype that it had."""
    if isinstance(symbol, RowSum):
        axes = [0, *symbol.axes]
        total = write(aten.sum.dim_IntList, symbol.rows, axes, dtype=value.dtype)
    else:
        total = write_sum(write, symbol.terms, value.dtype)
    if shape_of(total).shape == value.shape:
        return total
    return write(aten.reshape.default, total, list(value.shape))
