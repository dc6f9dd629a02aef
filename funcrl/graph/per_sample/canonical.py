"""One spelling for what torch writes in several ways, so that one rule reads each computation.

    view     the same numbers in another shape: view, _unsafe_view, reshape, an addition to zeros
    swap     transpose(1, 2), transpose(-2, -1), permute([0, 2, 1])
    cast     _to_copy to a floating-point dtype
    scale    mul.Tensor in either order, mul.Scalar, div.Tensor, neg
    square   x * x, x ** 2
    add      add.Tensor of two tensors
    product  bmm, mm
    scatter  rows added into zeros [B, V, D] at (b, token): index_put, or embedding_dense_backward
             into [B V, D] at token + b V, which is what vmap makes of an embedding's gradient
    join     cat of matrices, one above the other
    sum      sum.dim_IntList, its axes counted from the first
    norm     linalg_vector_norm of order 2, likewise

The graph is read and not changed: what no rule understands keeps its operations and its bits.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.fx import Node

from funcrl.graph.edit import arguments, shape_of
from funcrl.graph.tracing import look_through

aten = torch.ops.aten
_ZEROS = {aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}

Kind: TypeAlias = Literal[
    "view", "swap", "cast", "scale", "square", "add", "product", "scatter", "join", "sum", "norm"
]


class Spelled(NamedTuple):
    """The kind of an operation and its operands."""

    kind: Kind
    operands: tuple[Any, ...]


def normalise(node: Node) -> Spelled | None:
    """Return the one spelling of an operation, None if it has none."""
    read = _SPELLINGS.get(node.target) if node.op == "call_function" else None
    return read(node) if read is not None and node.all_input_nodes else None


def _view(node: Node) -> Spelled:
    return Spelled("view", (node.all_input_nodes[0],))


def _swap(node: Node) -> Spelled | None:
    source, *axes = arguments(node)
    transposes = node.target is aten.transpose.int and sorted(axes) in ([1, 2], [-2, -1])
    permutes = node.target is aten.permute.default and axes == [[0, 2, 1]]
    matrices = shape_of(source).ndim == 3
    return Spelled("swap", (source,)) if matrices and (transposes or permutes) else None


def _cast(node: Node) -> Spelled | None:
    floating = shape_of(node).is_floating_point()
    return Spelled("cast", (node.all_input_nodes[0],)) if floating else None


def _product(node: Node) -> Spelled:
    return Spelled("product", arguments(node))


def _add(node: Node) -> Spelled | None:
    if len(node.all_input_nodes) != 2 or node.kwargs:
        return None
    first, second = node.all_input_nodes
    if look_through(first).target in _ZEROS:
        return Spelled("view", (second,))
    return Spelled("add", (first, second))


def _scale(node: Node) -> Spelled:
    source, factor = arguments(node)
    if source is factor and node.target is aten.mul.Tensor:
        return Spelled("square", (source,))
    return Spelled("scale", (source, factor, node.target))


def _negate(node: Node) -> Spelled:
    return Spelled("scale", (node.all_input_nodes[0], -1, aten.mul.Tensor))


def _power(node: Node) -> Spelled | None:
    source, exponent = arguments(node)
    return Spelled("square", (source,)) if exponent == 2 else None


def _join(node: Node) -> Spelled | None:
    parts, *axis = arguments(node)
    return Spelled("join", tuple(parts)) if axis in ([1], [-2]) else None


def _sum(node: Node) -> Spelled | None:
    source, axes, *keep = arguments(node)
    return _reduction("sum", source, axes, *keep)


def _norm(node: Node) -> Spelled | None:
    source, *options = arguments(node)
    defaults: list[Any] = [2, None, False]
    order, axes, keep = [*options, *defaults[len(options) :]]
    return _reduction("norm", source, axes, keep) if order == 2 else None


def _reduction(
    kind: Kind, source: Node, axes: list[int] | None, keep: bool = False
) -> Spelled | None:
    ndim = shape_of(source).ndim
    positive = tuple(sorted(axis % ndim for axis in axes or range(ndim)))
    return Spelled(kind, (source, positive, keep))


def _embedding(node: Node) -> Spelled | None:
    rows, index, count, padding, by_frequency = arguments(node)
    if padding != -1 or by_frequency or index.target is not aten.add.Tensor or index.kwargs:
        return None
    tokens, offset = arguments(index)
    batch = shape_of(rows).shape[0]
    size = count // batch
    if count != batch * size or not _counts_samples(offset, batch, size):
        return None
    return Spelled("scatter", (rows, tokens, size, False))


def _index_put(node: Node) -> Spelled | None:
    zeros, indices, rows, *accumulate = arguments(node)
    if zeros.target not in _ZEROS or accumulate != [True] or len(indices) != 2:
        return None
    batch, size = shape_of(node).shape[:2]
    sample, tokens = indices
    if tokens is None or shape_of(tokens).dtype != torch.int64:
        return None
    # Of an index that is the same for all samples, such as a position, torch names no sample.
    alike = sample is None and shape_of(tokens).ndim == 1
    if not (alike or _counts_samples(sample, batch, 1)):
        return None
    return Spelled("scatter", (rows, tokens, size, True))


def _counts_samples(node: Any, batch: int, step: int) -> bool:
    """Return whether a node is [B, 1] and holds 0, step, 2 step and so on."""
    if not isinstance(node, Node) or tuple(shape_of(node).shape) != (batch, 1):
        return False
    while node.target in {*_VIEWS, aten.unsqueeze.default}:
        node = node.all_input_nodes[0]
    bounds = {
        aten.arange.default: ((batch,), 1),
        aten.arange.start: ((0, batch), 1),
        aten.arange.start_step: ((0, batch * step, step), step),
    }
    return (arguments(node), step) == bounds.get(node.target)


_SPELLINGS: dict[Any, Callable[[Node], Spelled | None]] = {
    **dict.fromkeys(_VIEWS, _view),
    aten.transpose.int: _swap,
    aten.permute.default: _swap,
    aten._to_copy.default: _cast,
    aten.bmm.default: _product,
    aten.mm.default: _product,
    aten.add.Tensor: _add,
    aten.mul.Tensor: _scale,
    aten.mul.Scalar: _scale,
    aten.div.Tensor: _scale,
    aten.neg.default: _negate,
    aten.pow.Tensor_Scalar: _power,
    aten.cat.default: _join,
    aten.embedding_dense_backward.default: _embedding,
    aten.index_put.default: _index_put,
    aten.sum.dim_IntList: _sum,
    aten.linalg_vector_norm.default: _norm,
}
