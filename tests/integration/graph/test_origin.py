"""Where the nodes of a graph come from: written by the tracer, kept by the passes."""

from functools import lru_cache

import pytest
import torch
from cases import tiny_batch, tiny_model

import funcrl
from funcrl import optim
from funcrl.graph.lowering import select_for_scatter
from funcrl.graph.nodes import Origin, is_late, layer_of, origin_of

OPTIONS = {
    "one turn": (1, {}),
    "three turns": (3, {"microbatch": 2}),
    "clipped": (2, {"microbatch": 3, "per_sample": funcrl.clip_per_sample(0.1)}),
    "prepared": (2, {"microbatch": 3, "prepare": funcrl.top_entropy(0.5)}),
}


@lru_cache
def traced(name, chunk=None):
    _, options = OPTIONS[name]
    model = tiny_model()
    model_fn = funcrl.logprob_fn(model, chunk=chunk)
    step = funcrl.grpo_step(model_fn, optimizer=optim.sgd(0.1, momentum=0.9), **options)
    params = funcrl.init_params(model, seed=0)
    return funcrl.trace(step.update, step.init(params), tiny_batch(dtype=torch.float32))


def origins(graph):
    return {n: origin_of(n) for n in graph.graph.nodes if n.op == "call_function"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "chunk"),  # each with chunks and without, and micro-batches of several kinds
    [*((name, None) for name in OPTIONS), ("one turn", 3), ("clipped", 3), ("prepared", 3)],
)
def test_each_micro_batch_is_a_turn_with_every_layer_forward_and_backward(name, chunk):
    turns, _ = OPTIONS[name]
    found = origins(traced(name, chunk))
    for phase in ("forward", "backward"):
        places = {(each.microbatch, each.layer) for each in found.values() if each.phase == phase}
        assert places == {
            (turn, layer) for turn in range(turns) for layer in ("", "blocks.0", "blocks.1")
        }
    seeds = [each.microbatch for each in found.values() if each.is_seed]
    assert seeds == list(range(turns))
    for node, each in found.items():
        reads = [origin_of(read) for read in node.all_input_nodes]
        if each.phase == "forward":
            assert not any(is_late(read) for read in node.all_input_nodes)
        assert all(read.microbatch <= each.microbatch for read in reads), node
        if each.phase == "optimizer" and any(read.path for read in reads):
            layers = {read.layer for read in reads} - {""}
            assert layers in ({each.layer}, set()), node


@pytest.mark.slow
def test_moments_are_of_the_layer_of_their_parameter():
    inputs = [origin_of(node) for node in traced("one turn").graph.find_nodes(op="placeholder")]
    moments = {each.path: each.layer for each in inputs if "opt_state" in each.path}
    assert sum(layer == "blocks.1" for layer in moments.values()) == 11
    assert all(("blocks.1" in path) == (layer == "blocks.1") for path, layer in moments.items())


def test_a_second_gradient_of_a_function_without_modules_is_a_second_turn():
    def fn(weight, rows):
        return [torch.func.grad(lambda w, row=row: (w * row).sin().sum())(weight) for row in rows]

    graph = funcrl.trace(fn, torch.ones(3), list(torch.ones(2, 3)))
    turns = [(each.phase, each.microbatch) for each in origins(graph).values()]
    assert turns == sorted(turns, key=lambda each: each[1])
    assert {("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1)} <= set(turns)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["one turn", "clipped"])
def test_passes_keep_the_origins(name):
    graph = traced(name, 3)
    before = {node.name: origin for node, origin in origins(graph).items()}
    for again in (
        funcrl.fuse_per_sample(graph),
        funcrl.remat(graph, "full"),
        select_for_scatter(graph),
    ):
        for node in again.graph.nodes:
            assert "origin" in node.meta, node
            if node.name in before:
                assert node.meta["origin"] == before[node.name]


def test_a_node_that_a_pass_left_without_an_origin_comes_from_where_its_input_does():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.ops.aten.sin.default, (graph.call_function(torch.sin, (x,)),))
    assert origin_of(node) == Origin("forward")
    x.meta["origin"] = Origin("input", layer="blocks.0")
    assert origin_of(node).layer == "blocks.0"


def test_a_layer_is_the_outermost_module_with_a_number():
    paths = {"blocks.3.attention.q": "blocks.3", "embed": "", "": "", "0.experts.7": "0"}
    assert {path: layer_of(path) for path in paths} == paths
