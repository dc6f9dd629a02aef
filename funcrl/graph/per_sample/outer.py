"""A per-sample gradient as algebra: a sum of outer products that nobody has computed yet.

A weight's gradient for sample b is `sum_t left[b, t, p] right[b, t, q]`, with T tokens, P outputs
and Q inputs: [B, P, Q] in all, the largest tensor of a training step by far. An embedding's is the
same with a one-hot `left`, of which only the index is kept. What a step wants of it is less:

    its sum over b       left^T right, over B T rows: one matmul of [P, B T] by [B T, Q]
    its norm for each b  sum_ts (left left^T)[b, t, s] (right right^T)[b, t, s]: two of [B, T, T]
    f[b] times it        the same with f[b] right
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch.fx import Node

from funcrl.core import numerics
from funcrl.graph.edit import Writer, shape_of

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
