"""Which nodes of a graph are per-sample gradients, as sums of outer products (`per_sample_terms`).

Each rule reads one kind of operation (`Spelled`) of inputs that are per-sample gradients, and
returns what its result is, or None: an operation that no rule understands ends the algebra.
"""

import math
import operator
from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor
from torch.fx import Graph, Node

from funcrl.graph.nodes import Writer, arguments, origin_of, shape_of
from funcrl.graph.per_sample_terms import Kind, OneHot, Outer, normalise, on_dense, width

aten = torch.ops.aten

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


class _Place(NamedTuple):
    """The node that a rule reads, and what it needs for it."""

    node: Node
    found: Symbols  # what the nodes before it are
    write: Writer

    def gradient(self, node: Any, *layouts: Layout) -> PerSample | None:
        """Return a node's per-sample gradient, None if it is none or in another layout."""
        symbol = self.found.get(node)
        if isinstance(symbol, PerSample) and (not layouts or symbol.layout in layouts):
            return symbol
        return None


def symbols(graph: Graph) -> Symbols:
    """Return the symbol of each node that has one; the rules add unused nodes to the graph."""
    found: Symbols = {}
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not value.is_floating_point():
            continue
        spelled = normalise(node)
        rule = _RULES.get(spelled.kind) if spelled is not None else None
        if spelled is not None and rule is not None:
            roots = {root for read in node.all_input_nodes for root in roots_of(found.get(read))}
            write = Writer(graph, node, described_best(roots or {node}))
            symbol = rule(_Place(node, found, write), *spelled.operands)
            if symbol is not None and _fits(symbol, tuple(value.shape)):
                found[node] = symbol
    return found


def _fits(symbol: Symbol, shape: tuple[int, ...]) -> bool:
    """Return whether a node of this shape can be what a symbol says, or was broadcast."""
    if isinstance(symbol, RowSum):
        whole = shape_of(symbol.rows).shape
        kept = [size for axis, size in enumerate(whole) if axis not in symbol.axes]
        return shape[:1] == whole[:1] and math.prod(shape) == math.prod(kept)
    of = symbol.of if isinstance(symbol, Square) else symbol
    batch, (rows, columns) = _batch(of), _widths(of)
    if batch is None:
        return False
    if isinstance(symbol, Square):  # only summed from here on, whatever the shape of a sample
        return shape[:1] == (batch,) and math.prod(shape) == batch * rows * columns
    layouts = {
        "vector": (batch, rows * columns),
        "rows": (batch * rows, columns),
        "matrix": (batch, rows, columns),
    }
    return shape == layouts[symbol.layout]


def roots_of(symbol: Symbol | None) -> frozenset[Node]:
    """Return the products that a gradient is computed from."""
    if symbol is None:
        return frozenset()
    return symbol.of.roots if isinstance(symbol, Square) else symbol.roots


def described_best(nodes: Collection[Node]) -> Node:
    """Return the node whose origin has a module, if one has; always the same one."""
    return min(nodes, key=lambda node: (not origin_of(node).module, node.name))


# -- rules ----------------------------------------------------------------------------------------


def _product(at: _Place, first: Node, second: Node) -> Symbol | None:
    """[B, P, T] x [B, T, Q] is a sum of outer products; a shared matrix joins one of its sides."""
    for inner, other in ((second, first), (first, second)):
        symbol = at.gradient(inner, "matrix", "rows")
        if symbol is not None:
            on_left = inner is second
            matrix = _shared(other) if symbol.layout == "matrix" else other
            allowed = matrix is not None and not (on_left and symbol.layout == "rows")
            return _times(at.write, symbol, matrix, on_left) if allowed else None
    if shape_of(at.node).ndim != 3:
        return None
    swapped = normalise(first)
    if swapped is not None and swapped.kind == "swap":
        left = swapped.operands[0]
    else:
        left = at.write(aten.transpose.int, first, 1, 2)
    return PerSample((Outer(left, second),), frozenset([at.node]))


def _shared(node: Any) -> Node | None:
    """Return the matrix that was expanded over the samples, if it was."""
    if node.target is aten.expand.default:
        source = arguments(node)[0]
        if shape_of(source).shape == shape_of(node).shape[1:]:
            return source
    return None


def _times(write: Writer, symbol: PerSample, matrix: Any, on_left: bool) -> PerSample | None:
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


def _view(at: _Place, source: Node) -> Symbol | None:
    """The same numbers in the layout that the new shape has."""
    symbol, shape = at.found.get(source), tuple(shape_of(at.node).shape)
    if not isinstance(symbol, PerSample):
        return symbol
    layouts = (symbol._replace(layout=layout) for layout in get_args(Layout))
    return next((each for each in layouts if _fits(each, shape)), None)


def _batch(symbol: PerSample) -> int | None:
    """Return B; None where sides differ in it, one being broadcast over the samples."""
    sides = [side.index if isinstance(side, OneHot) else side for t in symbol.terms for side in t]
    sizes = {shape_of(side).shape[0] for side in sides}
    return sizes.pop() if len(sizes) == 1 else None


def _swap(at: _Place, source: Node) -> Symbol | None:
    symbol = at.gradient(source, "matrix")
    if symbol is None:
        return None
    return symbol._replace(terms=tuple(Outer(term.right, term.left) for term in symbol.terms))


def _cast(at: _Place, source: Node) -> Symbol | None:
    """A cast changes nothing: sums and norms have a dtype of their own."""
    return at.found.get(source)


def _add(at: _Place, first: Node, second: Node) -> Symbol | None:
    one, other = at.gradient(first), at.gradient(second)
    if one is None or other is None or one.layout != other.layout or _widths(one) != _widths(other):
        return None
    return one._replace(terms=one.terms + other.terms, roots=one.roots | other.roots)


def _widths(symbol: PerSample) -> tuple[int, int]:
    return width(symbol.terms[0].left), width(symbol.terms[0].right)


def _scale(at: _Place, source: Node, factor: Any, operation: Any) -> Symbol | None:
    """One factor for all, or one a sample: it scales the rows of one side."""
    if source not in at.found and operation is aten.mul.Tensor:
        source, factor = factor, source
    symbol, write = at.gradient(source, "matrix", "vector"), at.write
    if symbol is None or factor is source:
        return None
    if isinstance(factor, Node):
        batch, shape = shape_of(at.node).shape[0], tuple(shape_of(factor).shape)
        if shape == (batch, *[1] * (len(shape) - 1)) and len(shape) == shape_of(at.node).ndim:
            factor = write(aten.reshape.default, factor, [batch, 1, 1])
        elif shape != ():
            return None

    def scaled(side: Node) -> Node:
        return write.cast(write(operation, side, factor), shape_of(side).dtype)

    return symbol._replace(terms=tuple(on_dense(term, scaled) for term in symbol.terms))


def _square(at: _Place, source: Node) -> Symbol | None:
    symbol = at.gradient(source)
    return Square(symbol) if symbol is not None else None


def _join(at: _Place, *sources: Node) -> Symbol | None:
    """Slices of the rows of one weight: the left sides side by side."""
    parts = [part for source in sources if (part := at.gradient(source, "matrix")) is not None]
    if len(parts) < len(sources) or len({len(part.terms) for part in parts}) > 1:
        return None
    terms = []
    for column in zip(*(part.terms for part in parts), strict=True):
        shared = len({term.right for term in column}) == 1
        if not shared or any(isinstance(term.left, OneHot) for term in column):
            return None
        lefts = [term.left for term in column]
        left = _whole(lefts) or at.write(aten.cat.default, lefts, 2)
        terms.append(Outer(left, column[0].right))
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


def _scatter(at: _Place, rows: Node, tokens: Node, size: int, wraps: bool) -> Symbol | None:
    """An embedding's gradient; a negative token may count from the end of the table."""
    batch = shape_of(rows).shape[0]
    if shape_of(tokens).ndim == 1:  # the same for all samples
        tokens = at.write(aten.expand.default, tokens, [batch, -1])
    if wraps:
        tokens = at.write(aten.remainder.Scalar, tokens, size)
    if shape_of(tokens).ndim != 2 or shape_of(tokens).shape != shape_of(rows).shape[:-1]:
        return None
    layout: Layout = "matrix" if shape_of(at.node).ndim == 3 else "rows"
    return PerSample((Outer(OneHot(tokens, size), rows),), frozenset([at.node]), layout)


def _sum(at: _Place, source: Node, axes: tuple[int, ...], _: bool) -> Symbol | None:
    """The gradient of a vector, which every token of a sample adds to."""
    if source in at.found or at.node.kwargs or 0 in axes or shape_of(source).ndim < 3:
        return None
    return RowSum(source, axes, frozenset([at.node]))


_RULES: dict[Kind, Callable[..., Symbol | None]] = {
    "product": _product,
    "view": _view,
    "swap": _swap,
    "cast": _cast,
    "add": _add,
    "scale": _scale,
    "square": _square,
    "join": _join,
    "scatter": _scatter,
    "sum": _sum,
}
