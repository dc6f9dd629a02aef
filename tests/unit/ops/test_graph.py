"""Traces of recurrent scans: their passes know what an operator costs, keeps and shares."""

import pytest
import torch
from graphs import flatten
from recurrent_cases import CELLS, WIDTH, WIDTH_IN, case, loss_of
from torch.func import grad, vmap
from torch.utils.flop_counter import FlopCounterMode

import funcrl
from funcrl import tree
from funcrl.core.custom_op import FLOPS
from funcrl.graph import live_bytes
from funcrl.graph.nodes import count_flops

PER_SAMPLE = (0, None, 0, 0, 0)


def gradient(cell, recompute="none"):
    loss = loss_of(cell, backend="op", recompute=recompute)
    return vmap(grad(loss, (0, 1, 2)), PER_SAMPLE)


def is_forward(node):
    return node.target is torch.ops.funcrl.recurrent_layer.default


def same_bits(mine, theirs):
    return all(map(torch.equal, tree.leaves(mine), tree.leaves(theirs)))


@pytest.mark.parametrize("cell", CELLS)
def test_a_trace_and_its_rematerialisation_have_the_bits_of_eager(cell):
    """Three layers alike: the tracer writes down the second and third from the first."""
    args = case(cell, (4,), 9, layers=3)
    flat = flatten(gradient(cell), *args)
    wanted = gradient(cell)(*args)
    assert same_bits(flat.run(), wanted)
    again = funcrl.remat(flat.gm, is_forward)
    assert sum(map(is_forward, again.graph.nodes)) > sum(map(is_forward, flat.gm.graph.nodes)) == 3
    assert same_bits(flat.run(again), wanted)


@pytest.mark.parametrize(("cell", "recompute", "again"), [
    ("lstm", "none", 0), ("lstm", "chunk", 1), ("lstm", "full", 2), ("gru", "full", 1),
])  # fmt: skip
def test_the_operations_of_the_products_are_counted(cell, recompute, again):
    """A step is a product of x and one of h, in both passes; each has gradients of two factors."""
    steps, rows = 4 * 9, {"lstm": 4, "gru": 3}[cell] * WIDTH
    forward = 2 * steps * rows * (WIDTH_IN + WIDTH)
    flat = flatten(gradient(cell, recompute), *case(cell, (4,), 9))
    counted = [count for node in flat.gm.graph.nodes if (count := count_flops(node))]
    assert counted == [forward, (2 + again) * forward]
    with FlopCounterMode(custom_mapping=FLOPS, display=False) as counter:
        gradient(cell, recompute)(*case(cell, (4,), 9))
    assert counter.get_total_flops() == sum(counted)


def test_the_predicted_peak_is_less_by_what_is_not_kept():
    """With 100 sequences of 50 steps, the gates and cell states of one of two layers at least."""
    peaks = {}
    for recompute in ("none", "full"):
        flat = flatten(gradient("lstm", recompute), *case("lstm", (100,), 50, layers=2))
        peaks[recompute] = max(live_bytes(flat.gm))
    assert peaks["none"] - peaks["full"] >= 100 * 50 * 5 * WIDTH * 8
