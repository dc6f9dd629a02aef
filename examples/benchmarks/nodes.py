"""Where a graph's time goes: each node timed alone, then summed by layer and by kind of op."""

import re
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from funcrl.graph.aliases import is_view
from funcrl.graph.nodes import has_flops, origin_of

PHASES = ("forward", "recomputed", "backward", "optimizer")
OUTSIDE = "outside the model"
_VIEW = "view"
_COPIES = ("_to_copy", "clone", "copy_", "cat", "stack", "roll", "constant_pad_nd")
_FILLS = re.compile("^(new_)?(zeros|ones|full|empty|arange|scalar_tensor)(_like)?$")
_INDEX = re.compile("index|gather|scatter|embedding|one_hot")
_REDUCTION = re.compile(
    "^(_log_softmax|_softmax|_safe_softmax|sum|mean|a?max|a?min|any|all|logsumexp|norm|"
    "linalg_vector_norm|var|cumsum|sort|topk)(_backward_data)?$"
)


class NodeTime(NamedTuple):
    """One node of a graph and how long it took."""

    layer: str
    kind: str
    phase: str
    seconds: float


class _Timer(fx.Interpreter):
    """Runs a graph node by node and waits for each."""

    def __init__(self, gm: fx.GraphModule, synchronize: Callable[[], None]) -> None:
        super().__init__(gm)
        self.seconds: dict[fx.Node, float] = {}
        self._synchronize = synchronize

    def run_node(self, node: fx.Node) -> Any:
        """Return the node's value, computed when this returns."""
        start = time.perf_counter()
        result = super().run_node(node)
        self._synchronize()
        self.seconds[node] = time.perf_counter() - start
        return result


def time_nodes(
    gm: fx.GraphModule, args: Sequence[Any], repeats: int, device: str
) -> list[NodeTime]:
    """Return the median time of each node over several runs of the graph.

    The graph is run as it is, one op after the other, before any compiler fuses it; on a GPU the
    host waits after every node, so that each time includes a launch (some 10 microseconds).
    """
    seconds: dict[fx.Node, list[float]] = defaultdict(list)
    for _ in range(repeats + 1):
        timer = _Timer(gm, torch.cuda.synchronize if device == "cuda" else lambda: None)
        with torch.no_grad():
            timer.run(*args)
        for node, value in timer.seconds.items():
            seconds[node].append(value)
    kinds = find_kinds(gm)
    return [
        NodeTime(layer_of(node), kinds[node], phase_of(node), statistics.median(values[1:]))
        for node, values in seconds.items()
        if node.op == "call_function"
    ]


def layer_of(node: fx.Node) -> str:
    """Return a module path up to its first number, or its first name: `blocks.3`, `embed`.

    What no module computes is the optimizer's, or outside the model: the loss and its metrics.
    """
    origin = origin_of(node)
    if not origin.module:
        return "optimizer" if origin.phase == "optimizer" else OUTSIDE
    return origin.layer or origin.module.partition(".")[0]


def find_kinds(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """Return of each node what kind of work it is."""
    return {node: _VIEW if is_view(node) else _kind(node) for node in gm.graph.nodes}


def _kind(node: fx.Node) -> str:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return "other"
    name = target._schema.name.partition("::")[2]
    if target.namespace != "aten":
        return f"{target.namespace}::{name}"
    if has_flops(node):
        arguments = {argument.name for argument in target._schema.arguments}
        return "attention" if arguments >= {"query", "key", "value"} else "matmul"
    if name in _COPIES:
        return "copy"
    if _FILLS.match(name):
        return "fill"
    if _INDEX.search(name):
        return "index"
    if _REDUCTION.match(name):
        return "reduction"
    return "pointwise" if torch.Tag.pointwise in target.tags else "other"


def format_times(times: Sequence[NodeTime]) -> str:
    """Return Markdown tables of milliseconds: by kind, by layer, and by layer and kind."""
    tables = [
        _table("kind", times, lambda each: (each.kind,)),
        _table("layer", times, lambda each: (each.layer,)),
        _table("layer | kind", times, lambda each: (each.layer, each.kind)),
    ]
    return "\n\n".join(tables)


def _table(
    title: str, times: Sequence[NodeTime], key: Callable[[NodeTime], tuple[str, ...]]
) -> str:
    """Return a row for each group of nodes that have the same key, and one for all nodes."""
    groups: dict[tuple[str, ...], list[NodeTime]] = defaultdict(list)
    for each in times:
        groups[key(each)].append(each)
    # Layers in the order in which they run, the slowest kind of each first.
    cost = {names: -sum(each.seconds for each in members) for names, members in groups.items()}
    places = {layer: place for place, layer in enumerate(dict.fromkeys(t.layer for t in times))}
    order = sorted(groups, key=lambda names: (places.get(names[0], 0), cost[names]))
    total = sum(each.seconds for each in times)
    phases = [phase for phase in PHASES if any(each.phase == phase for each in times)]
    lines = [f"| {title} | nodes | {' | '.join(phases)} | ms | % |"]
    lines.append("|---" * (lines[0].count("|") - 1) + "|")
    everything = ("all", *[""] * title.count("|"))
    for names in [*order, everything]:
        members = times if names is everything else groups[names]
        own = dict.fromkeys(phases, 0.0)
        for each in members:
            own[each.phase] += each.seconds
        cells = [f"{1e3 * value:.3f}" if value else "" for value in own.values()]
        seconds = sum(own.values())
        share = f"{100 * seconds / total:.1f}"
        cells = [*names, str(len(members)), *cells, f"{1e3 * seconds:.3f}", share]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def phase_of(node: fx.Node) -> str:
    """Return a node's phase, where what is computed again is one of its own."""
    return "recomputed" if node.meta.get("recomputed") else origin_of(node).phase
