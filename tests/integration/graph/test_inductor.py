"""Steps compiled by Inductor: the same numbers but for rounding, and no more memory.

In one file, so that one process compiles what the tests have in common once.
"""

import random

import pytest
import torch
from cases import relative, small_network, tiny_batch, tiny_model, twice
from graphs import Flat
from torch._dynamo.utils import counters
from torch.utils import _pytree as pytree

import funcrl
from benchmarks.measure import peak_bytes
from funcrl import CompileConfig, optim, tree
from funcrl.graph import add_fences
from funcrl.graph.compilation import _flat

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("one_thread")]

# AdamW's first step divides each entry of a gradient by its own size, which turns rounding of
# entries near 0 into anything; SGD leaves it as it is.
SGD = {"optimizer": optim.sgd(1.0, momentum=0.9), "per_sample": funcrl.clip_per_sample(0.01)}


def step_of(num_layers, **options):
    """A step in float64, its parameters and a batch.

    At position 0: other rotations are float32 whatever the parameters are, and Inductor's exp, cos
    and sin differ from torch's in the last bit of that (1.9e-8 of a gradient, measured).
    """
    model = tiny_model(num_layers=num_layers)
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    batch = tiny_batch()
    batch = batch._replace(positions=torch.zeros_like(batch.positions))
    return funcrl.grpo_step(funcrl.logprob_fn(model), **(options or SGD)), params, batch


@pytest.mark.slow
def test_a_step_in_one_piece_changes_rounding_alone_and_is_kept_in_a_file(tmp_path):
    step, params, batch = step_of(num_layers=1)
    config = CompileConfig(backend="inductor", cache_dir=tmp_path / "cache")
    torch._dynamo.reset()
    graph = funcrl.graph.step_graph(step, step.init(params), batch, config)
    fast = funcrl.compile_step(step, step.init(params), batch, config, graph)
    got = twice(fast, step.init(params), batch)
    assert relative(got, twice(step, step.init(params), batch)) <= 1e-12
    (kept,) = (tmp_path / "cache").iterdir()
    torch._dynamo.reset()
    again = funcrl.compile_step(step, step.init(params), batch, config, graph)
    for one, other in zip(
        tree.leaves(twice(again, step.init(params), batch)), tree.leaves(got), strict=True
    ):
        assert torch.equal(one, other)
    assert [kept] == list((tmp_path / "cache").iterdir())


@pytest.mark.slow
def test_kernels_kept_for_other_vectors_are_not_loaded(monkeypatch):
    """Kernels written for 512 bits and compiled for 256 leave elements unwritten."""
    factor = random.random()  # torch's cache has no such kernel of an earlier run

    def model_fn(params, sample):
        logprobs = factor * params["scale"] * sample.tokens.cos()
        return funcrl.TokenScores(logprobs, logprobs)

    step = funcrl.grpo_step(model_fn, optimizer=optim.sgd(0.1))
    state, batch = step.init({"scale": torch.ones(())}), tiny_batch()
    own = torch.backends.cpu.get_cpu_capability()
    found = []
    for capability in (own, "DEFAULT", own):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda it=capability: it)
        torch._dynamo.reset()
        counters.clear()
        funcrl.compile_step(step, state, batch, CompileConfig(backend="inductor"))(state, batch)
        found.append(
            {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("hit", "miss")}
        )
    assert found == [{"hit": 0, "miss": 1}, {"hit": 0, "miss": 1}, {"hit": 1, "miss": 0}]


@pytest.mark.slow
def test_a_donated_step_in_pieces_that_computes_again_changes_rounding_alone():
    step, params, batch = step_of(num_layers=2, optimizer=SGD["optimizer"])
    config = CompileConfig(backend="inductor", remat="selective")
    donated = funcrl.donate(step)
    torch._dynamo.reset()
    fast = funcrl.compile_step(donated, donated.init(params), batch, config)
    got = twice(fast, donated.init(params), batch)
    assert relative(got, twice(step, step.init(params), batch)) <= 1e-12


def step_whose_activations_outweigh_its_parameters():
    torch.manual_seed(0)
    net = small_network(num_layers=3)
    apply = funcrl.functional(net)

    def model_fn(params, sample):
        return funcrl.token_scores(apply(params, sample.tokens), sample.tokens)

    step = funcrl.grpo_step(model_fn, optimizer=optim.sgd(0.1))
    params = {name: leaf.detach() for name, leaf in net.named_parameters()}
    return step, step.init(params), tiny_batch(rows=4, length=64, dtype=torch.float32)


@pytest.mark.slow
def test_what_is_computed_again_is_not_merged_away():
    """In pieces Inductor is given a layer's forward and backward pass one by one; in one graph it
    is held apart by fences, without which it computes both copies in one kernel and keeps the
    result."""
    step, state, batch = step_whose_activations_outweigh_its_parameters()
    traced = funcrl.trace(step.update, state, batch)
    peaks = {}
    for name in ("none", "full"):
        torch._dynamo.reset()
        config = CompileConfig(backend="inductor", remat=name)
        graph = funcrl.remat(traced, name)
        fast = funcrl.compile_step(step, state, batch, config, graph)
        peaks[name] = peak_bytes(lambda fast=fast: fast(state, batch))
    torch._dynamo.reset()
    flat = Flat(_flat(add_fences(graph)), pytree.tree_leaves((state, batch)))
    compiled = torch.compile(flat.gm)  # under no_grad, as every graph runs
    for x, y in zip(flat.run(), flat.run(compiled), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-6)
    peaks["fenced"] = peak_bytes(lambda: flat.run(compiled))
    assert peaks["full"] < 0.3 * peaks["none"], peaks
    assert peaks["fenced"] < 0.3 * peaks["none"], peaks  # without fences 0.34 (2026-11-22)
