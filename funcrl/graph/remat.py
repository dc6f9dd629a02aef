"""Rematerialisation: less memory for more work, as a rewriting of the step's flat graph.

What the forward pass computes and only the backward pass reads again need not be kept: it can be
computed a second time, where it is read. The result has the same bits, since the same ops run on
the same values. It comes before `donate`: what has been overwritten cannot be read again.

A graph runs one node after the other and frees a tensor after the last node that reads it; inputs
and outputs belong to the caller. `predict_peak` adds that up before anything runs; what an operator
allocates for itself while it runs is in no graph.
"""

from bisect import bisect_left
from collections import ChainMap
from collections.abc import Callable, Collection
from itertools import accumulate, chain
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from funcrl.core import checks
from funcrl.core.arguments import checked
from funcrl.graph.aliases import Storages, find_storages, is_view
from funcrl.graph.nodes import (
    as_module,
    count_flops,
    draws,
    has_flops,
    is_late,
    origin_of,
    set_origin,
)


@checked
def predict_peak(gm: fx.GraphModule) -> int:
    """Return the most bytes alive at once while a graph runs, its inputs and outputs included.

    Args:
        gm: a flat graph of ATen and custom ops with `node.meta["val"]`, as `make_fx` leaves it.

    Example:
        >>> import torch, funcrl
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1).exp().sum())(torch.zeros(100))
        >>> funcrl.graph.predict_peak(gm)  # x, x + 1 and its exponential, 400 bytes each
        1200
    """
    return max(live_bytes(gm))


@checked
def live_bytes(gm: fx.GraphModule) -> list[int]:
    """Return the bytes alive while each node runs, in the order of `gm.graph.nodes`.

    Args:
        gm: a flat graph of ATen and custom ops with `node.meta["val"]`.

    Example:
        >>> import torch, funcrl
        >>> from torch.fx.experimental.proxy_tensor import make_fx
        >>> gm = make_fx(lambda x: (x + 1).exp().sum())(torch.zeros(100))
        >>> funcrl.graph.live_bytes(gm)  # x, add, exp, sum, output
        [400, 800, 1200, 804, 404]
    """
    storages = find_storages(gm)
    end = len(gm.graph.nodes) - 1
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for place, node in enumerate(gm.graph.nodes):
        stays = node.op in ("placeholder", "get_attr")
        for storage in storages.of[node]:
            first.setdefault(storage, 0 if stays else place)
        for touched in (node, *node.all_input_nodes):
            for storage in storages.of[touched]:
                last[storage] = end if stays else max(place, last.get(storage, 0))
    changes = [0] * (end + 2)
    for storage, place in first.items():
        changes[place] += storages.num_bytes[storage]
        changes[last[storage] + 1] -= storages.num_bytes[storage]
    return list(accumulate(changes[:-1]))


aten = torch.ops.aten
RematName: TypeAlias = Literal["none", "full", "selective", "budget"]
# A name, or node -> whether to compute it again.
RematPolicy: TypeAlias = RematName | Callable[[fx.Node], bool]
# An H200 multiplies about this often in the time in which it moves one byte.
_FLOPS_A_BYTE = 200


class _Step(NamedTuple):
    """A graph, with what the policies read."""

    gm: fx.GraphModule
    late: set[fx.Node]  # the backward pass and what follows
    layers: dict[fx.Node, tuple[int, str]]  # each micro-batch has its own
    inner: set[fx.Node]  # what a layer makes and hands to no other
    heavy: set[fx.Node]  # those of them that take long: products, attention, custom ops
    storages: Storages
    makers: dict[int, fx.Node]  # of each storage: the node that allocates it
    written: set[int]  # the storages that are written while something may be computed again


@checked
def remat(gm: fx.GraphModule, policy: RematPolicy, budget: int | None = None) -> fx.GraphModule:
    """Return a graph that computes anew in its backward pass what the policy tags.

    A tagged value is computed again just before the first node of the backward pass that reads it,
    from values that are kept; its first copy is freed when the forward pass is done with it. The
    results have the same bits.

    Args:
        gm: a graph from `funcrl.trace` of a whole step, or of a gradient.
        policy: "none"; "full", by which a repeated layer keeps only what it hands on;
            "selective", by which it also keeps products and the results of attention; "budget",
            the least work, in that order, whose predicted peak fits; or a function
            `node -> bool`. A view goes with the tensor that it looks at.
        budget: for "budget" alone, in bytes: the largest peak, inputs and outputs included.

    Returns:
        A new graph; `predict_peak` of it tells its memory, `recomputed_cost` the added work.

    Example:
        >>> import torch, funcrl
        >>> gm = funcrl.trace(torch.func.grad(lambda x: x.exp().sin().sum()), torch.zeros(3))
        >>> again = funcrl.remat(gm, lambda node: node.name == "exp")
        >>> [node.name for node in again.graph.nodes if node.meta.get("recomputed")]
        ['exp_recomputed']
    """
    if (budget is not None) != (policy == "budget"):
        raise ValueError(
            f"remat expects a budget with policy 'budget', and only with it, got policy "
            f"{policy!r} and budget {budget!r}."
        )
    step = _analyse(gm)
    if policy == "none":
        return _rewrite(step, set())
    if callable(policy):
        return _rewrite(step, _tagged_by(policy, step))
    if not step.layers:
        raise ValueError(
            f"remat expects repeated layers for policy {policy!r}, got a graph without any; pass "
            f"a function of a node instead."
        )
    if budget is not None:
        checks.check_count("remat", "budget", budget)
        return _fit(step, budget)
    return _rewrite(step, step.inner if policy == "full" else step.inner - step.heavy)


@checked
def recomputed_cost(gm: fx.GraphModule) -> int:
    """Return the work that `remat` added, in bytes that could be moved in the same time.

    What each op reads and writes, and 200 operations of a product for a byte: an estimate that
    compares plans, not a time.

    Args:
        gm: a result of `remat`.

    Example:
        >>> import torch, funcrl
        >>> gm = funcrl.trace(torch.func.grad(lambda x: x.exp().sin().sum()), torch.zeros(3))
        >>> again = funcrl.remat(gm, lambda node: node.name == "exp")
        >>> funcrl.graph.recomputed_cost(again)  # three floats read, three written
        24
    """
    return sum(_cost(node) for node in gm.graph.nodes if node.meta.get("recomputed"))


def _analyse(gm: fx.GraphModule) -> _Step:
    late = {node for node in gm.graph.nodes if is_late(node)}
    if not late:
        raise ValueError(
            "remat expects a graph with a backward pass, as funcrl.trace records it, got one "
            "without."
        )
    origins = {node: origin_of(node) for node in gm.graph.nodes if node.op == "call_function"}
    layers = {
        node: (origin.microbatch, origin.layer)
        for node, origin in origins.items()
        if origin.layer and node not in late
    }
    storages = find_storages(gm)
    makers: dict[int, fx.Node] = {}
    written = _written_within(gm, late, storages)
    # What must stay as it is: the layers' results, and what some op writes in place.
    fixed = set(written)
    for node in gm.graph.nodes:
        for storage in storages.of[node]:
            makers.setdefault(storage, node)
        if node not in late:
            for read in node.all_input_nodes:
                if layers.get(read) != layers.get(node):
                    fixed.update(storages.of[read])
    inner = {
        node
        for node in layers
        if fixed.isdisjoint(storages.of[node]) and not _reads(node, written, storages)
    }
    heavy_makers = {node for node in inner if _takes_long(node)} - _attention_scores(inner)
    heavy = {node for node in inner if _maker(node, storages, makers) in heavy_makers}
    return _Step(gm, late, layers, inner, heavy, storages, makers, written)


def _written_within(gm: fx.GraphModule, late: set[fx.Node], storages: Storages) -> set[int]:
    """Return the storages that are written before the backward pass has read all that it reads.

    A donated step writes its new state over the old one after that, which changes nothing that is
    computed again.
    """
    early = {node for node in gm.graph.nodes if node.op == "call_function"} - late
    reads = [
        place
        for place, node in enumerate(gm.graph.nodes)
        if node in late and node.op != "output" and not early.isdisjoint(node.all_input_nodes)
    ]
    last = reads[-1] if reads else 0
    return {storage for storage, place in storages.written.items() if place <= last}


def _takes_long(node: fx.Node) -> bool:
    """Return whether a node is a product, or an operator of which nobody says what it does."""
    target = node.target
    known = isinstance(target, torch._ops.OpOverload) and target.namespace in ("aten", "funcrl")
    return has_flops(node) or not known


def _attention_scores(inner: set[fx.Node]) -> set[fx.Node]:
    """Return the products that a softmax reads, directly or through pointwise operations.

    [T, T] numbers a head, each a sum of only C products: kept, they are most of a layer's memory,
    and recomputed they cost no more than the softmax.
    """
    softmax = (aten._softmax.default, aten._safe_softmax.default)
    waiting = [node for node in inner if node.target in softmax]
    scores, seen = set(), set(waiting)
    while waiting:
        for read in set(waiting.pop().all_input_nodes) & inner - seen:
            seen.add(read)
            if has_flops(read):
                scores.add(read)
            else:
                waiting.append(read)
    return scores


def _tagged_by(policy: Callable[[fx.Node], bool], step: _Step) -> set[fx.Node]:
    early = [
        node for node in step.gm.graph.nodes if node.op == "call_function" and node not in step.late
    ]
    chosen = {node for node in early if policy(node)}
    tagged = {node for node in early if _maker(node, step.storages, step.makers) in chosen}
    for node in tagged:
        if _reads(node, step.written, step.storages):
            raise ValueError(
                f"remat expects a policy that tags nothing that is written in place, "
                f"got {node.name!r}, {node.target}."
            )
    return tagged


def _maker(node: fx.Node, storages: Storages, makers: dict[int, fx.Node]) -> fx.Node:
    """Return the node that allocated what a node's value lives in; most often itself."""
    return makers[storages.of[node][0]] if storages.of[node] else node


def _reads(node: fx.Node, some: set[int], storages: Storages) -> bool:
    return any(not some.isdisjoint(storages.of[read]) for read in node.all_input_nodes)


def _rewrite(step: _Step, tagged: Collection[fx.Node]) -> fx.GraphModule:
    """Return a copy of the graph whose late nodes read second copies of what is tagged."""
    order = {node: place for place, node in enumerate(step.gm.graph.nodes)}
    graph = fx.Graph()
    graph.set_codegen(step.gm.graph._codegen)  # the trees that it takes and returns
    first: dict[fx.Node, fx.Node] = {}
    second: dict[fx.Node, fx.Node] = {}
    microbatch = 0
    for node in step.gm.graph.nodes:
        if node not in step.late:
            if origin_of(node).microbatch > microbatch:
                # The next micro-batch has begun: nothing is to wait for its backward pass.
                microbatch, second = origin_of(node).microbatch, {}
            first[node] = graph.node_copy(node, first.__getitem__)
            continue
        latest = ChainMap(second, first)
        for again in sorted(_needed(node, tagged, second), key=order.__getitem__):
            if draws(again):
                raise ValueError(
                    f"remat expects deterministic ops to compute again, got {again.name!r}, "
                    f"{again.target}, which would draw other numbers."
                )
            args, kwargs = fx.node.map_arg((again.args, again.kwargs), latest.__getitem__)
            name = f"{again.name}_recomputed"
            copy = graph.create_node(again.op, again.target, args, kwargs, name)
            copy.meta = {**again.meta, "recomputed": True}
            set_origin(copy, origin_of(again)._replace(phase="backward"))
            second[again] = copy
        first[node] = graph.node_copy(node, latest.__getitem__)
    graph.eliminate_dead_code()
    return as_module(graph, step.gm)


def _needed(node: fx.Node, tagged: Collection[fx.Node], done: Collection[fx.Node]) -> set[fx.Node]:
    """Return what must be computed again before a node can run."""
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        for read in waiting.pop().all_input_nodes:
            if read in tagged and read not in done and read not in found:
                found.add(read)
                waiting.append(read)
    return found


def _fit(step: _Step, budget: int) -> fx.GraphModule:
    """Return the graph of least recomputation whose predicted peak is within a budget."""
    parts = _parts(step)
    made: dict[int, tuple[int, fx.GraphModule]] = {}

    def fits(count: int) -> bool:
        gm = _rewrite(step, set(chain.from_iterable(parts[:count])))
        made[count] = predict_peak(gm), gm
        return made[count][0] <= budget

    count = bisect_left(range(len(parts) + 1), True, key=fits)
    if count > len(parts):
        least = min(peak for peak, _ in made.values())
        raise ValueError(
            f"remat expects a budget of at least {least} bytes, the least peak that it can "
            f"reach, got {budget}."
        )
    return made[count][1]


def _parts(step: _Step) -> list[list[fx.Node]]:
    """Return groups of nodes to tag, in order: light ones by layer, then each heavy value.

    Heavy values come in the order of what a byte of them costs. Early layers come first: they
    keep their values longest.
    """
    light: dict[tuple[int, str], list[fx.Node]] = {}
    heavy: dict[fx.Node, list[fx.Node]] = {}
    for node in (node for node in step.gm.graph.nodes if node in step.inner):
        if node in step.heavy:
            heavy.setdefault(_maker(node, step.storages, step.makers), []).append(node)
        else:
            light.setdefault(step.layers[node], []).append(node)

    def price(maker: fx.Node) -> float:
        sizes = (step.storages.num_bytes[storage] for storage in step.storages.of[maker])
        return _cost(maker) / max(sum(sizes), 1)

    return [*light.values(), *(heavy[maker] for maker in sorted(heavy, key=price))]


def _cost(node: fx.Node) -> int:
    """Return the bytes that an op moves and, as bytes, its operations; a view is free."""
    if is_view(node):
        return 0
    moved = sum(
        tensor.numel() * tensor.element_size()
        for value in [read.meta["val"] for read in (*node.all_input_nodes, node)]
        for tensor in (value if isinstance(value, list | tuple) else [value])
        if isinstance(tensor, Tensor)
    )
    return moved + count_flops(node) // _FLOPS_A_BYTE
