"""Per-sample gradients as sums of outer products, from graphs in one spelling of each operation."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch.fx import Node

from funcrl.core import numerics
from funcrl.graph.nodes import Writer, arguments, shape_of
from funcrl.graph.tracing import look_through

aten = torch.ops.aten


@dataclass(frozen=True)
class OneHot:
    """The rows of an identity matrix that an index picks: [B, T, size], never made."""

    index: Node  # [B, T] int64
    size: int


Side: TypeAlias = Node | OneHot


class Outer(NamedTuple):
    """`sum_t left[b, t, :] right[b, t, :]^T` for each sample b."""

    left: Side  # [B, T, P]
    right: Side  # [B, T, Q]


def width(side: Side) -> int:
    """Return P or Q."""
    return side.size if isinstance(side, OneHot) else shape_of(side).shape[2]


def _length(term: Outer) -> int:
    """Return T."""
    side = term.left.index if isinstance(term.left, OneHot) else term.left
    return shape_of(side).shape[1]


def on_dense(term: Outer, fn: Callable[[Node], Node]) -> Outer:
    """Return the term with a linear function of its rows applied to its narrower dense side."""
    if isinstance(term.right, OneHot):
        return Outer(on_dense(Outer(term.right, term.left), fn).right, term.right)
    if isinstance(term.left, OneHot) or width(term.right) <= width(term.left):
        return term._replace(right=fn(term.right))
    return term._replace(left=fn(term.left))


def write_sum(write: Writer, terms: tuple[Outer, ...], dtype: torch.dtype) -> Node:
    """Write the sum over samples [P, Q]: a matmul for each dense term, added in `dtype`."""
    return write.sum(write.cast(_sum_term(write, term), dtype) for term in terms)


def _sum_term(write: Writer, term: Outer) -> Node:
    if isinstance(term.right, OneHot):
        return write(aten.t.default, _sum_term(write, Outer(term.right, term.left)))
    rows = write.rows(term.right)
    if isinstance(term.left, OneHot):
        index = write.rows(term.left.index)
        return write(aten.embedding_dense_backward.default, rows, index, term.left.size, -1, False)
    return write(aten.mm.default, write(aten.t.default, write.rows(term.left)), rows)


def write_norm(write: Writer, terms: tuple[Outer, ...], root: bool, dtype: torch.dtype) -> Node:
    """Write each sample's norm [B], or its square, by the cheaper of two ways."""
    if gram_is_cheaper(terms) or any(isinstance(side, OneHot) for term in terms for side in term):
        squared = _square_norm(write, _merge_dense(write, terms))
        return write.cast(write(aten.sqrt.default, squared) if root else squared, dtype)
    (term,) = _merge_dense(write, terms)
    product = write(aten.bmm.default, write(aten.transpose.int, term.left, 1, 2), term.right)
    wide = torch.promote_types(shape_of(product).dtype, dtype)
    norm = write(aten.linalg_vector_norm.default, product, 2, [1, 2], dtype=wide)
    return write.cast(norm if root else write(aten.pow.Tensor_Scalar, norm, 2), dtype)


def _square_norm(write: Writer, terms: list[Outer]) -> Node:
    """Write the squared norm of each sample's [P, Q] by Gram matrices, [B] in at least float32."""
    pairs = ((first, second) for i, first in enumerate(terms) for second in terms[i:])
    total = write.sum(_inner_product(write, first, second) for first, second in pairs)
    # A sum of products of both signs may round to just below 0.
    return write(aten.clamp.default, total, 0)


def _inner_product(write: Writer, first: Outer, second: Outer) -> Node:
    """Write the sum of the products of two terms' entries, twice if they are two terms."""
    lefts = _gram(write, first.left, second.left)
    product = write(aten.mul.Tensor, lefts, _gram(write, first.right, second.right))
    total = write(aten.sum.dim_IntList, product, [1, 2])
    return total if second is first else write(aten.mul.Tensor, total, 2)


def _merge_dense(write: Writer, terms: tuple[Outer, ...]) -> list[Outer]:
    """Return the terms with the dense ones as a single one of all their tokens."""
    dense = [t for t in terms if not (isinstance(t.left, OneHot) or isinstance(t.right, OneHot))]
    if len(dense) < 2:
        return list(terms)
    left = write(aten.cat.default, [term.left for term in dense], 1)
    right = write(aten.cat.default, [term.right for term in dense], 1)
    return [Outer(left, right), *(term for term in terms if term not in dense)]


def _gram(write: Writer, first: Side, second: Side) -> Node:
    """Write `first second^T` for each sample: [B, T, S]."""
    if isinstance(first, OneHot) and isinstance(second, OneHot):
        equal = write(
            aten.eq.Tensor,
            write(aten.unsqueeze.default, first.index, 2),
            write(aten.unsqueeze.default, second.index, 1),
        )
        return write(aten._to_copy.default, equal, dtype=torch.float32)
    if isinstance(first, OneHot):
        return write(aten.transpose.int, _gram(write, second, first), 1, 2)
    value = shape_of(first)
    wide = numerics.at_least_float32(value.dtype)
    if isinstance(second, OneHot):
        tokens = list(shape_of(second.index).shape)
        index = write(aten.unsqueeze.default, second.index, 1)
        index = write(aten.expand.default, index, [tokens[0], value.shape[1], tokens[1]])
        return write.cast(write(aten.gather.default, first, 2, index), wide)
    transposed = write(aten.transpose.int, second, 1, 2)
    if (
        value.dtype != wide
        and value.device.type == "cuda"
        and value.dtype == shape_of(second).dtype
    ):
        # Tensor cores, and sums that are never rounded to 16 bits.
        return write(aten.bmm.dtype, first, transposed, wide)
    return write(aten.bmm.default, write.cast(first, wide), write.cast(transposed, wide))


def gram_is_cheaper(terms: tuple[Outer, ...]) -> bool:
    """Return whether the [B, P, Q] is larger than what it is made of.

    For one dense term of T tokens that is `P Q > T (P + Q)`, which is also where Gram products,
    `2 T^2 (P + Q)` operations a sample, cost less than the `2 T P Q` of the products themselves:
    one rule for time and for memory.
    """
    operands = sum(
        _length(term) * (1 if isinstance(side, OneHot) else width(side))
        for term in terms
        for side in term
    )
    return width(terms[0].left) * width(terms[0].right) > operands


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
