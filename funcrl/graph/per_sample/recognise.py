"""Which nodes of a graph are per-sample gradients, written as algebra (`outer`, beside this).

Each rule reads one kind of node whose inputs are understood and says what it is. A rule that does
not fit gives nothing, and nothing is built on nothing: unknown operations end the algebra.
"""

import math
import operator
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.fx import Graph, Node

from funcrl.graph.cleaning import look_through
from funcrl.graph.edit import arguments
from funcrl.graph.per_sample.outer import OneHot, Outer, Writer, on_dense, shape_of, width

aten = torch.ops.aten
_ZEROS = {aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default}
_VIEWS = {aten.view.default, aten._unsafe_view.default, aten.reshape.default}

Layout: TypeAlias = Literal["matrix", "rows", "vector"]


class PerSample(NamedTuple):
    """A sum of outer products for each sample: [B, P, Q], [B P, Q] or [B, P Q]."""

    terms: tuple[Outer, ...]
    roots: frozenset[Node]  # the products that it was read from
    layout: Layout = "matrix"


class Square(NamedTuple):
    """The squares of a per-sample gradient's entries."""

    of: PerSample


class RowSum(NamedTuple):
    """A sum over tokens for each sample: [B, D], of a vector's gradient."""

    rows: Node  # [B, ..., T, ..., D]
    axes: tuple[int, ...]  # what it was summed over, without the first
    roots: frozenset[Node]


Symbol: TypeAlias = PerSample | Square | RowSum
Symbols: TypeAlias = dict[Node, Symbol]


def symbols(graph: Graph) -> Symbols:
    """Return what is understood of the graph; rules add nodes to it, which are dead until used.

    Args:
        graph: is added to.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.per_sample.recognise import symbols
        >>> x = torch.ones(2, 3, 4)
        >>> graph = funcrl.trace(lambda a, b: torch.bmm(a.mT, b).mT, x, x).graph
        >>> [type(symbol).__name__ for symbol in symbols(graph).values()]
        ['PerSample', 'PerSample']
    """
    found: Symbols = {}
    for node in list(graph.nodes):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        value = node.meta.get("val")
        real = isinstance(value, Tensor) and not value.is_complex()  # a Gram product conjugates
        if rule is not None and node.all_input_nodes and real:
            roots = {root for read in node.all_input_nodes for root in roots_of(found.get(read))}
            symbol = rule(node, found, Writer(graph, node, described_best(roots or {node})))
            if symbol is not None and _fits(symbol, tuple(shape_of(node).shape)):
                found[node] = symbol
    return found


def _fits(symbol: Symbol, shape: tuple[int, ...]) -> bool:
    """Whether a node of this shape can hold what a symbol says: an operation may have broadcast."""
    if isinstance(symbol, RowSum):
        whole = shape_of(symbol.rows).shape
        kept = [size for axis, size in enumerate(whole) if axis not in symbol.axes]
        return shape[:1] == whole[:1] and math.prod(shape) == math.prod(kept)
    of = symbol.of if isinstance(symbol, Square) else symbol
    batch, (rows, columns) = _batch(of), _widths(of)
    if isinstance(symbol, Square):  # only summed from here on, whatever the shape of a sample
        return shape[:1] == (batch,) and math.prod(shape) == batch * rows * columns
    layouts = {
        "vector": (batch, rows * columns),
        "rows": (batch * rows, columns),
        "matrix": (batch, rows, columns),
    }
    return shape == layouts[symbol.layout]


def roots_of(symbol: Symbol | None) -> frozenset[Node]:
    """Return the products that a gradient begins with: they know its module.

    Example:
        >>> from funcrl.graph.per_sample.recognise import roots_of
        >>> roots_of(None)
        frozenset()
    """
    if symbol is None:
        return frozenset()
    return symbol.of.roots if isinstance(symbol, Square) else symbol.roots


def described_best(nodes: Collection[Node]) -> Node:
    """Return the node that knows its module, if one does; always the same one.

    Example:
        >>> import torch, funcrl
        >>> from funcrl.graph.per_sample.recognise import described_best
        >>> nodes = list(funcrl.trace(lambda x: x.exp().sin(), torch.ones(1)).graph.nodes)[1:3]
        >>> nodes[1].meta["module"] = "blocks.0"
        >>> described_best(nodes)
        sin
    """
    return min(nodes, key=lambda node: (not node.meta.get("module"), node.name))


def _bmm(node: Node, found: Symbols, write: Writer) -> Symbol | None:
    """[B, P, T] x [B, T, Q] is a sum of outer products; a shared matrix joins one of its sides."""
    first, second = arguments(node)
    for inner, other in ((second, first), (first, second)):
        symbol = found.get(inner)
        if isinstance(symbol, PerSample) and symbol.layout == "matrix":
            shared = _shared(other)
            return _times(write, symbol, shared, on_left=inner is second) if shared else None
    left = write(aten.transpose.int, first, 1, 2)
    source = arguments(first)[0] if first.target is aten.transpose.int else None
    if isinstance(source, Node) and sorted(arguments(first)[1:]) == [1, 2]:
        left = source
    return PerSample((Outer(left, second),), frozenset([node]))


def _shared(node: Any) -> Node | None:
    """Return the matrix that was expanded over the samples, if it was."""
    if node.target is aten.expand.default and shape_of(arguments(node)[0]).ndim == 2:
        return arguments(node)[0]
    return None


def _times(write: Writer, symbol: PerSample, matrix: Node, on_left: bool) -> PerSample | None:
    """Return `matrix @ x`, or `x @ matrix`: the matrix applied to the rows of one side."""
    terms = []
    for term in symbol.terms:
        side = term.left if on_left else term.right
        if isinstance(side, OneHot):
            return None
        # (M l) as rows is l M^T.
        factor = write(aten.t.default, matrix) if on_left else matrix
        shape = [*shape_of(side).shape[:2], shape_of(factor).shape[1]]
        product = write(aten.mm.default, write.rows(side), factor)
        new = write(aten.view.default, product, shape)
        terms.append(term._replace(left=new) if on_left else term._replace(right=new))
    return symbol._replace(terms=tuple(terms))


def _mm(node: Node, found: Symbols, write: Writer) -> Symbol | None:
    """[B P, Q] times a matrix that all samples share."""
    symbol = found.get(node.all_input_nodes[0])
    if isinstance(symbol, PerSample) and symbol.layout == "rows":
        return _times(write, symbol, arguments(node)[1], on_left=False)
    return None


def _view(node: Node, found: Symbols, _: Writer) -> Symbol | None:
    """The same numbers in another shape: which one `_fits` tells."""
    symbol, shape = found.get(node.all_input_nodes[0]), tuple(shape_of(node).shape)
    if not isinstance(symbol, PerSample):
        return symbol
    layouts = (symbol._replace(layout=layout) for layout in get_args(Layout))
    return next((each for each in layouts if _fits(each, shape)), None)


def _batch(symbol: PerSample) -> int:
    side = symbol.terms[0].left
    return shape_of(side.index if isinstance(side, OneHot) else side).shape[0]


def _transpose(node: Node, found: Symbols, _: Writer) -> Symbol | None:
    symbol = found.get(node.all_input_nodes[0])
    _, *axes = arguments(node)
    swaps = node.target is aten.transpose.int and sorted(axes) in ([1, 2], [-2, -1])
    swaps = swaps or (node.target is aten.permute.default and axes == [[0, 2, 1]])
    if isinstance(symbol, PerSample) and symbol.layout == "matrix" and swaps:
        return symbol._replace(terms=tuple(Outer(t.right, t.left) for t in symbol.terms))
    return None


def _cast(node: Node, found: Symbols, _: Writer) -> Symbol | None:
    """A cast is free: sums and norms are taken in the dtype that they are asked for."""
    floating = shape_of(node).is_floating_point()
    return found.get(node.all_input_nodes[0]) if floating else None


def _add(node: Node, found: Symbols, _: Writer) -> Symbol | None:
    if len(node.all_input_nodes) != 2 or node.kwargs:
        return None
    first, second = (found.get(source) for source in node.all_input_nodes)
    if first is None and look_through(node.all_input_nodes[0]).target in _ZEROS:
        return second
    if not (isinstance(first, PerSample) and isinstance(second, PerSample)):
        return None
    if first.layout != second.layout or _widths(first) != _widths(second):
        return None
    return first._replace(terms=first.terms + second.terms, roots=first.roots | second.roots)


def _widths(symbol: PerSample) -> tuple[int, int]:
    return width(symbol.terms[0].left), width(symbol.terms[0].right)


def _scale(node: Node, found: Symbols, write: Writer) -> Symbol | None:
    """One factor for all, or one a sample: it scales the rows of one side."""
    source, factor = arguments(node)
    if source not in found and node.target is aten.mul.Tensor:
        source, factor = factor, source
    symbol = found.get(source)
    if factor is source:
        product = node.target is aten.mul.Tensor
        return Square(symbol) if product and isinstance(symbol, PerSample) else None
    if not isinstance(symbol, PerSample) or symbol.layout == "rows":
        return None
    if isinstance(factor, Node):
        batch, shape = shape_of(node).shape[0], tuple(shape_of(factor).shape)
        if shape == (batch, *[1] * (len(shape) - 1)) and len(shape) == shape_of(node).ndim:
            factor = write(aten.reshape.default, factor, [batch, 1, 1])
        elif shape != ():
            return None

    def scaled(side: Node) -> Node:
        return write.cast(write(node.target, side, factor), shape_of(side).dtype)

    return symbol._replace(terms=tuple(on_dense(term, scaled) for term in symbol.terms))


def _negate(node: Node, found: Symbols, write: Writer) -> Symbol | None:
    symbol = found.get(node.all_input_nodes[0])
    if not isinstance(symbol, PerSample):
        return None
    negated = tuple(on_dense(t, lambda side: write(aten.neg.default, side)) for t in symbol.terms)
    return symbol._replace(terms=negated)


def _power(node: Node, found: Symbols, _: Writer) -> Symbol | None:
    symbol = found.get(node.all_input_nodes[0])
    return Square(symbol) if isinstance(symbol, PerSample) and arguments(node)[1] == 2 else None


def _cat(node: Node, found: Symbols, write: Writer) -> Symbol | None:
    """Slices of the rows of one weight: the left sides side by side."""
    sources, *axis = arguments(node)
    parts = [part for source in sources if isinstance(part := found.get(source), PerSample)]
    if len(parts) < len(sources) or axis not in ([1], [-2]):
        return None
    if {part.layout for part in parts} != {"matrix"} or len({len(p.terms) for p in parts}) > 1:
        return None
    terms = []
    for column in zip(*(part.terms for part in parts), strict=True):
        shared = len({term.right for term in column}) == 1
        if not shared or any(isinstance(term.left, OneHot) for term in column):
            return None
        lefts = [term.left for term in column]
        terms.append(Outer(_whole(lefts) or write(aten.cat.default, lefts, 2), column[0].right))
    return PerSample(tuple(terms), frozenset(root for part in parts for root in part.roots))


def _whole(parts: list[Any]) -> Node | None:
    """Return the tensor that these are all the parts of, in order."""
    split = arguments(parts[0])[0] if parts[0].target is operator.getitem else None
    if len(parts) == 1:
        return parts[0]
    if split is None or split.target is not aten.split.Tensor or arguments(split)[2:] != (2,):
        return None
    every = [(split, index) for index in range(len(split.meta["val"]))]
    return arguments(split)[0] if [arguments(part) for part in parts] == every else None


def _embedding(node: Node, _: Symbols, __: Writer) -> Symbol | None:
    """What vmap makes of an embedding's gradient: one table of B V rows, indexed by token + b V."""
    rows, index, count, padding, by_frequency = arguments(node)
    if padding != -1 or by_frequency or index.target is not aten.add.Tensor or index.kwargs:
        return None
    tokens, offset = arguments(index)
    batch = shape_of(rows).shape[0]
    size = count // batch
    if count != batch * size or not _counts_samples(offset, batch, size):
        return None
    return _scatter(node, tokens, size, rows, "rows")


def _index_put(node: Node, _: Symbols, write: Writer) -> Symbol | None:
    """A scatter of rows into zeros [B, V, D] at (b, token), the other form of the same."""
    zeros, indices, rows, *accumulate = arguments(node)
    if zeros.target not in _ZEROS or accumulate != [True] or len(indices) != 2:
        return None
    batch, size = shape_of(node).shape[:2]
    sample, tokens = indices
    if sample is None:  # of an index that is the same for all samples, such as a position
        alike = tokens is not None and shape_of(tokens).ndim == 1
        tokens = write(aten.expand.default, tokens, [batch, -1]) if alike else None
    elif not _counts_samples(sample, batch, 1):
        return None
    if tokens is None or shape_of(tokens).dtype != torch.int64:
        return None
    # Indexing counts a negative index from the end; an embedding's gradient does not.
    tokens = write(aten.remainder.Scalar, tokens, size)
    return _scatter(node, tokens, size, rows, "matrix")


def _counts_samples(node: Any, batch: int, step: int) -> bool:
    """Whether a node is [B, 1] and holds 0, step, 2 step and so on."""
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


def _scatter(node: Node, tokens: Any, size: int, rows: Any, layout: Layout) -> Symbol | None:
    if shape_of(tokens).ndim != 2 or shape_of(tokens).shape != shape_of(rows).shape[:-1]:
        return None
    return PerSample((Outer(OneHot(tokens, size), rows),), frozenset([node]), layout)


def _sum(node: Node, found: Symbols, _: Writer) -> Symbol | None:
    source, axes = arguments(node)[:2]
    ndim = shape_of(source).ndim
    positive = tuple(axis % ndim for axis in axes)  # none are all of them
    if source in found or node.kwargs or not positive or 0 in positive or ndim < 3:
        return None
    return RowSum(source, positive, frozenset([node]))


_RULES: dict[Any, Callable[[Node, Symbols, Writer], Symbol | None]] = {
    aten.bmm.default: _bmm,
    aten.mm.default: _mm,
    **dict.fromkeys(_VIEWS, _view),
    aten.transpose.int: _transpose,
    aten.permute.default: _transpose,
    aten._to_copy.default: _cast,
    aten.add.Tensor: _add,
    aten.mul.Tensor: _scale,
    aten.mul.Scalar: _scale,
    aten.div.Tensor: _scale,
    aten.neg.default: _negate,
    aten.pow.Tensor_Scalar: _power,
    aten.cat.default: _cat,
    aten.embedding_dense_backward.default: _embedding,
    aten.index_put.default: _index_put,
    aten.sum.dim_IntList: _sum,
}
