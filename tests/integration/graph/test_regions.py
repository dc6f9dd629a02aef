"""A step in pieces: the same bits in a right order, and each kind of layer once."""

import copy
import gc
from collections import Counter
from functools import lru_cache

import pytest
import torch
from cases import equal, random_case, tiny_batch, tiny_model
from torch import fx

import funcrl
from benchmarks.measure import peak_bytes
from funcrl import CompileConfig, optim, tree
from funcrl.graph import add_fences, split_repeated
from funcrl.graph.lowering import select_for_scatter
from funcrl.graph.nodes import has_flops, is_free, origin_of, set_origin

pytestmark = pytest.mark.usefixtures("one_thread")

CLIP = {"per_sample": funcrl.clip_per_sample(0.1)}
BF16 = {"model": {"dtype": torch.bfloat16, "chunk": 3}, "dtype": torch.float32}
# An optimizer of few operations, where it is not what is looked at: tracing takes seconds.
SGD = {"optimizer": optim.sgd(0.1)}
STEPS = {
    "batch": {},
    "sgd": {"optimizer": optim.sgd(0.1, momentum=0.9)},
    "identity": {**SGD, "per_sample": lambda rows: rows},
    "clipped": {**SGD, **CLIP},
    "donated": {"donated": True},
    "clipped, donated": {**SGD, **CLIP, "donated": True},
    "three turns": {**SGD, "microbatch": 2},
    "two turns": {**SGD, "microbatch": 3},
    "chunked bfloat16, donated": {**SGD, **BF16, "donated": True},
    "flash": {**SGD, "model": {"attend": funcrl.ops.attend_flash}},
    "lora": {"lora": True},
    "packed": {**SGD, "packed": True},
    "masked": {"optimizer": optim.masked(optim.adamw(0.1), lambda path, leaf: "mlp" in path)},
}
# Each is a step and the passes over its graph, which is traced once for all of them.
CASES = {
    **{name: (name, {}) for name in STEPS if name != "clipped, donated"},
    "fused": ("identity", {"fuse": True}),
    "clipped, fused": ("clipped", {"fuse": True}),
    "selective": ("batch", {"remat": "selective"}),
    "full": ("batch", {"remat": "full"}),
    "all at once": ("clipped, donated", {"fuse": True, "remat": "selective"}),
    "two turns, full": ("two turns", {"remat": "full"}),
    "chunked bfloat16, donated, full": ("chunked bfloat16, donated", {"remat": "full"}),
}
COUNTED = [
    "batch", "fused", "clipped, fused", "selective", "full", "donated", "two turns, full"
]  # fmt: skip


def make(num_layers=3, length=7, dtype=torch.float64, **options):
    """A step, a state, a batch and the graph of it."""
    donated, lora, packed = (options.pop(name, False) for name in ("donated", "lora", "packed"))
    model = tiny_model(num_layers=num_layers)
    model_fn = funcrl.logprob_fn(model, **options.pop("model", {}))
    params = funcrl.init_params(model, seed=0, dtype=dtype)
    if lora:
        adapted = funcrl.lora(model_fn, params, rank=2)
        model_fn, params = adapted.model_fn, adapted.init(0)
    batch = tiny_batch(length=length, dtype=dtype)
    if packed:
        rollout = random_case(prompts=2, completion=3).rollout
        rollout = rollout._replace(tokens=rollout.tokens % 11)
        batch = funcrl.pack(rollout, funcrl.grpo(), length=20)
        assert batch.segment_ids.max() > 0
    step = funcrl.grpo_step(model_fn, **options)
    state = step.init(params)
    step = funcrl.donate(step) if donated else step
    return step, state, batch, funcrl.trace(step.update, state, batch)


def passed(graph, fuse=False, remat="none"):
    """The graph after the passes."""
    return funcrl.remat(funcrl.fuse_per_sample(graph) if fuse else graph, remat)


@lru_cache
def traced(name, num_layers):
    return make(num_layers, **STEPS[name])


@lru_cache
def made(name, num_layers=2):
    """A step, a state, a batch and the graph of it after the passes."""
    step, passes = CASES[name]
    *given, graph = traced(step, num_layers)
    return *given, passed(graph, **passes)


def run(graph, *args):
    """What a graph returns and what becomes of its arguments."""
    args = copy.deepcopy(args)
    torch.manual_seed(0)
    with torch.no_grad():
        return graph(*args), args


def calls(pieces):
    """How often each piece is called."""
    return Counter(node.target for node in pieces.graph.nodes if node.op == "call_module")


def targets(pieces, key):
    return {node.target for node in pieces.get_submodule(key).graph.nodes}


def computed(graph):
    """The operations that a graph computes, without those that are made where they are read."""
    return Counter(
        node.target
        for node in graph.nodes
        if node.op == "call_function"
        and not is_free(node)
        and node.target.__module__ != "_operator"
    )


class Watched(fx.Interpreter):
    """Runs the pieces, and checks that no piece returns memory that it or another was given."""

    def call_module(self, target, args, kwargs):
        results = super().call_module(target, args, kwargs)
        places = [value.untyped_storage().data_ptr() for value in results]
        assert len(set(places)) == len(places)
        assert {value.untyped_storage().data_ptr() for value in args}.isdisjoint(places)
        return results


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_every_bit_is_kept_and_no_piece_returns_what_it_was_given(name):
    _, state, batch, graph = made(name)
    before = str(graph.graph)
    pieces = split_repeated(graph)
    assert str(graph.graph) == before
    got, expected = run(pieces, state, batch), run(graph, state, batch)
    assert equal(got, expected)
    with torch.no_grad():
        watched = Watched(pieces).run(*copy.deepcopy((state, batch)))
    assert equal(watched, expected[0])


# -- counting -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", COUNTED)
def test_layers_are_one_piece_whatever_their_number(name):
    """Once, or once a layer (and a micro-batch), of which the first and the last are no other."""
    turns = 2 if "two turns" in name else 1
    seen = []
    for num_layers in (2, 3):
        graph = made(name, num_layers)[-1]
        pieces = split_repeated(graph)
        counts = calls(pieces)
        assert sorted(counts) == sorted(name for name, _ in pieces.named_children())
        assert set(counts.values()) == {1, num_layers, turns * num_layers}
        inside = {key: computed(pieces.get_submodule(key).graph) for key in counts}
        # Nothing is left out, and twice is computed only what an optimizer does entry by entry,
        # before it has looked at all of its results and after; a layer's own is in its pieces.
        total = Counter()
        for key, count in counts.items():
            total.update({op: count * times for op, times in inside[key].items()})
        assert not computed(graph.graph) - total
        assert all(torch.Tag.pointwise in op.tags for op in total - computed(graph.graph))
        repeated = {key for key, count in counts.items() if count > 1}
        phases = Counter(
            phase
            for key in repeated
            for phase in {origin_of(n).phase for n in pieces.get_submodule(key).graph.nodes
                          if n.op == "call_function" and not is_free(n)}
        )  # fmt: skip
        assert {"forward", "backward", "optimizer"} <= phases.keys()
        alone = sum(
            has_flops(node)
            for key in counts.keys() - repeated
            for node in pieces.get_submodule(key).graph.nodes
        )
        seen.append((len(counts), Counter(c // num_layers for c in counts.values()), phases, alone))
    assert seen[0] == seen[1]
    # Products outside the layers: the head's, whose gradients are two more, and their Grams.
    assert seen[0][-1] <= 3 * turns + 4 * ("clipped" in name)


@pytest.mark.slow
def test_a_chunked_head_for_inductor_leaves_the_layers_alike():
    counts = [
        calls(split_repeated(select_for_scatter(made("chunked bfloat16, donated", n)[-1])))
        for n in (2, 3)
    ]
    alone = [list(count.values()).count(1) for count in counts]
    assert [set(count.values()) for count in counts] == [{1, 2}, {1, 3}]
    assert alone[0] == alone[1] < len(counts[0]) == len(counts[1])


def test_results_behind_a_check_are_not_kept():
    """`skip_nonfinite` looks at all updates and moments: no piece hands one to another."""
    _, state, _, graph = made("donated", 2)
    pieces = split_repeated(graph)
    sizes = {leaf.shape for leaf in tree.leaves(state.params) if leaf.ndim == 2}
    late = [
        node
        for node in graph.graph.nodes
        if origin_of(node).phase == "optimizer" and node.target is torch.ops.aten.lerp.Scalar
    ]
    assert len(late) == len(state.params)  # new first moments: each computed in two pieces
    times = sum(
        count * computed(pieces.get_submodule(key).graph)[torch.ops.aten.lerp.Scalar]
        for key, count in calls(pieces).items()
    )
    assert times == 2 * len(late)
    for piece in pieces.children():
        made_here = [
            node for node in piece.graph.nodes if node.target is torch.ops.aten.lerp.Scalar
        ]
        returned = piece.graph.output_node().all_input_nodes
        assert not [
            node for node in made_here if node in returned and node.meta["val"].shape in sizes
        ]


# -- order ----------------------------------------------------------------------------------------


def test_micro_batches_come_one_after_the_other():
    """All of a turn's layers forward, then all backward, before the next turn begins."""
    pieces = split_repeated(made("three turns")[-1])
    often = {key for key, count in calls(pieces).items() if count == 6}
    ops = torch.ops.aten.silu.default, torch.ops.aten._softmax_backward_data.default
    forward, backward = ({key for key in often if op in targets(pieces, key)} for op in ops)
    assert (len(forward), len(backward)) == (1, 1)
    order = [node.target for node in pieces.graph.nodes if node.op == "call_module"]
    order = "".join("F" if t in forward else "B" if t in backward else "" for t in order)
    assert order == "FFBB" * 3


def dying_bytes(pieces, args):
    """The most bytes that a piece is given and nobody reads after it."""
    sizes = {}

    class Sized(fx.Interpreter):
        def run_node(self, node):
            result = super().run_node(node)
            sizes[node] = result.nbytes if isinstance(result, torch.Tensor) else 0
            return result

    with torch.no_grad():
        Sized(pieces, garbage_collect_values=False).run(*args)
    nodes = list(pieces.graph.nodes)
    last = {read: node for node in nodes for read in node.all_input_nodes}
    return max(
        sum(sizes[read] for read in node.all_input_nodes
            if last[read] is node and read.op == "call_function")
        for node in nodes if node.op == "call_module"
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all at once", "two turns"])
def test_memory_grows_by_what_one_piece_is_given(name):
    """A caller holds what it passes until the call returns: for one layer's backward pass all that
    its forward pass kept, of which a flat graph frees some while it runs. With three layers that
    is at most 15 %, and less with more."""
    step, passes = CASES[name]
    _, state, batch, graph = make(length=48, **{**STEPS[step], "dtype": torch.float32})
    graph = passed(graph, **passes)
    pieces = split_repeated(graph)
    gc.collect()

    def measured(module):
        with torch.no_grad():
            return peak_bytes(lambda: module(state, batch))

    flat, split = measured(graph), measured(pieces)
    assert split <= flat + dying_bytes(pieces, (state, batch))
    assert split <= 1.15 * flat


def writes_at_the_end(x, y):
    old = x.double()
    x.copy_(y)
    return old + 1


def writes_before_a_view_is_read(x, y):
    view = x.view(3, 1)
    x.copy_(y)
    return view + 1, x * 2


def writes_between_two_readings(x, y):
    old = x.double()
    x.copy_(y)
    return old + x, old.view(3, 1)


def swaps(x, y):
    total, old = (x * 2).sum(), x.clone()
    x.copy_(y)
    y.copy_(old)
    return total, x + 1, y.exp()


def writes_twice(x, y):
    first = x + 1
    x.copy_(y)
    second = x * 2
    x.copy_(first)
    return second + x


def returns_the_old_value(x, y):
    old = x.double().view(3, 1)
    x.copy_(y + 1)
    return old, x.double()[None]


def windows(x, y):
    parts = x.unfold(0, 2, 1)
    total = parts.sum()
    x.copy_(y)
    return total


@pytest.mark.parametrize(
    "fn",
    [writes_at_the_end, writes_before_a_view_is_read, writes_between_two_readings, swaps,
     writes_twice, returns_the_old_value, windows],
)  # fmt: skip
@pytest.mark.parametrize("num_layers", [1, 2])
def test_what_is_written_is_read_before_or_after_as_it_was(fn, num_layers):
    """In layers, whose order is free but for that."""

    def layers(pairs):
        return [fn(*pair) for pair in pairs]

    pairs = [(torch.arange(3.0) + n, torch.arange(3.0) - n) for n in range(num_layers)]
    graph = funcrl.trace(layers, pairs)
    operations = [node for node in graph.graph.nodes if node.op == "call_function"]
    count = len(operations) // num_layers
    for place, node in enumerate(operations):
        # Of one function every second operation is of another layer: neighbours are torn apart.
        layer = place % 2 if num_layers == 1 else place // count
        set_origin(node, origin_of(node)._replace(layer=f"blocks.{layer}"))
    assert equal(run(split_repeated(graph), pairs), run(graph, pairs))


def test_a_donated_parameter_is_written_after_all_that_reads_it():
    """Metrics that read the old parameters and the new ones, and two leaves that change places."""

    def update(state, batch):
        old = state.params
        new = {"blocks.0.a": old["blocks.1.a"], "blocks.1.a": old["blocks.0.a"].double().float()}
        sums = {"old": old["blocks.0.a"].double().sum(), "new": (new["blocks.1.a"] * 2).sum()}
        both = (old["blocks.0.a"] * old["blocks.1.a"]).sum()
        return state._replace(params=new), funcrl.Metrics(sums, {}, {"both": both}, {})

    params = {"blocks.0.a": torch.zeros(2), "blocks.1.a": torch.ones(2)}
    state = funcrl.TrainState(params, (), torch.tensor(0), torch.tensor(0))
    step = funcrl.donate(funcrl.Step(funcrl.grpo_step(lambda *_: None).init, update))
    graph = funcrl.trace(step.update, state, tiny_batch())
    (new, metrics), (written, _) = run(split_repeated(graph), state, tiny_batch())
    assert [leaf.tolist() for leaf in new.params.values()] == [[1, 1], [0, 0]]
    assert equal(written.params, new.params)
    assert [float(value) for value in (*metrics.sums.values(), *metrics.maxes.values())] == [
        0,
        0,
        0,
    ]


# -- graphs of other kinds ------------------------------------------------------------------------


def test_random_numbers_are_drawn_in_the_same_order():
    def fn(x):
        first, second = torch.rand_like(x), torch.rand_like(x)
        later = second * 2  # is read before the first one
        return first - later

    graph = funcrl.trace(fn, torch.ones(3))
    pieces = split_repeated(graph)
    assert calls(pieces).total() == 1
    assert equal(run(pieces, torch.ones(3)), run(graph, torch.ones(3)))


def chain(weights, x):
    for weight in weights:
        x = (x @ weight).sin()
    return x.sum()


def test_without_modules_all_is_one_piece():
    args = list(torch.randn(3, 4, 4)), torch.randn(2, 4)
    graph = funcrl.trace(torch.func.grad(chain), *args)
    pieces = split_repeated(graph)
    assert calls(pieces).total() == len(list(pieces.children())) <= 2
    assert equal(run(pieces, *args), run(graph, *args))


@pytest.mark.slow
def test_one_layer_is_no_repetition():
    _, state, batch, graph = make(num_layers=1)
    pieces = split_repeated(graph)
    assert calls(pieces) == {"piece_0": 1}
    assert equal(run(pieces, state, batch), run(graph, state, batch))
    again = add_fences(funcrl.remat(graph, "selective"))  # as for Inductor
    assert torch.ops.funcrl.fence.default in {node.target for node in again.graph.nodes}
    assert equal(run(split_repeated(again), state, batch), run(graph, state, batch))
    nothing = funcrl.trace(lambda x: {"x": x}, torch.ones(2))
    assert equal(split_repeated(nothing)(torch.ones(2)), {"x": torch.ones(2)})


def test_constants_are_given_to_pieces_by_reference():
    """Layers whose constants have other values are one piece, and of another shape another."""
    tables = [torch.randn(4), torch.randn(4), torch.randn(1)]
    blocks = torch.nn.ModuleList(torch.nn.Linear(4, 4, bias=False) for _ in tables)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = blocks

        def forward(self, x):
            for block, table in zip(self.blocks, tables, strict=True):
                x = (block(x) * table).sin()
            return x

    params = {name: leaf.detach() for name, leaf in blocks.named_parameters(prefix="blocks")}
    apply = funcrl.functional(Net())
    graph = funcrl.trace(lambda params, x: apply(params, x), params, torch.randn(2, 4))
    operations = [node for node in graph.graph.nodes if node.op == "call_function"]
    per_layer = len(operations) // len(tables)
    for place, node in enumerate(operations):
        set_origin(node, origin_of(node)._replace(layer=f"blocks.{place // per_layer}"))
    pieces = split_repeated(graph)
    assert calls(pieces) == {"piece_0": 2, "piece_1": 1}
    x = torch.randn(2, 4)
    assert equal(run(pieces, params, x), run(graph, params, x))
    held = {leaf.data_ptr() for leaf in pieces.buffers()}
    assert held >= {table.data_ptr() for table in tables}


# -- compiled -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["all at once", "lora"])
def test_autograds_compiler_keeps_every_bit(name):
    step, state, batch, graph = made(name)
    config = CompileConfig(backend="aot_eager")
    fast = funcrl.compile_step(step, state, batch, config, graph)
    expected, _ = run(graph, state, batch)
    new, metrics = fast(copy.deepcopy(state), batch)
    metrics.maxes.pop("num_recompilations")
    assert equal((new, metrics), expected)
