"""What ranks send in a step, counted from its graph on a group of 64 that does not exist."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import traffic

from funcrl.models import Transformer

ROOT = Path(__file__).parents[3]
PROGRAM = """
import math
import torch
from cases import tiny_batch, tiny_model
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
import funcrl
from funcrl.graph import predict_peak, step_graph
from funcrl.graph.gathers import gather_late
from funcrl.parallel import Axis, Mesh, layout_of, own_rows

SIZE = 64
distributed.init_process_group("fake", rank=3, world_size=SIZE, store=FakeStore())
EVERY = Axis(SIZE, 3, distributed.group.WORLD.group_name)
model = tiny_model()
params = funcrl.init_params(model, seed=0)
whole = sum(leaf.numel() for leaf in params.values())
rows = {name: math.ceil(leaf.shape[0] / SIZE) for name, leaf in params.items()}  # of a rank
held = sum(rows[name] * leaf[0].numel() for name, leaf in params.items())


def sent(shard, mesh=None, rows=4, microbatch=None):
    # Bytes that each kind of collective takes in, and the largest tensor that one gives.
    mesh = mesh or (Mesh(shard=EVERY, all=EVERY) if shard else Mesh(data=EVERY, all=EVERY))
    layout = layout_of(params) if shard == "state" else ()
    step = funcrl.grpo_step(
        funcrl.logprob_fn(model), mesh=mesh, layout=layout, microbatch=microbatch
    )
    state = step.init(params)
    numbers = [leaf.numel() for leaf in funcrl.tree.leaves(state.params)]
    batch = own_rows(tiny_batch(rows=rows, dtype=torch.float32), mesh)
    graph = funcrl.trace(step.update, state, batch)
    found, largest = {}, 0
    for node in graph.graph.nodes:
        name = str(node.target)
        if "_c10d_functional" in name and "wait" not in name:
            value = node.args[0].meta["val"]
            kind = name.split(".")[1]
            if value.dtype == torch.float32:  # metrics are float64
                found[kind] = found.get(kind, 0) + value.nbytes
                largest = max(largest, node.meta["val"].nbytes)
    return sum(numbers), found, largest


most = max(leaf.nbytes for leaf in params.values())
numbers, found, _ = sent("")
assert numbers == whole
assert found == {"all_reduce": 4 * whole}, found
numbers, found, largest = sent("optimizer")
assert numbers == whole
scattered = {"reduce_scatter_tensor": 4 * SIZE * held}
norms = 2 * 4  # of the gradients, for the metric and for the clip
assert found == scattered | {"all_gather_into_tensor": 4 * held + norms}, (found, held)
numbers, found, largest = sent("state")
assert numbers == held
assert found == scattered | {"all_gather_into_tensor": 4 * held + norms}, (found, held)
assert largest <= 4 * SIZE * max(rows[name] * leaf[0].numel() for name, leaf in params.items())
# Groups of eight that share a state: each micro-batch is summed within one, their sum over all.
blocks, columns = (distributed.new_group(ranks) for ranks in ([*range(8)], [*range(3, SIZE, 8)]))
mesh = Mesh(Axis(8, 0, columns.group_name), Axis(8, 3, blocks.group_name), EVERY)
held = sum(math.ceil(leaf.shape[0] / 8) * leaf[0].numel() for leaf in params.values())
numbers, found, _ = sent("optimizer", mesh, rows=4 * SIZE, microbatch=1)
assert found["reduce_scatter_tensor"] == 4 * 4 * 8 * held, (found, held)
assert found["all_reduce"] == 4 * held, (found, held)


# Compiled, parameters are whole a layer at a time: in bytes of the predicted peak.
def peaks(layers, rows=4, microbatch=None):
    model = tiny_model(num_layers=layers, width=64, mlp_width=256)
    params = funcrl.init_params(model, seed=0)
    mesh = Mesh(shard=EVERY, all=EVERY)
    step = funcrl.grpo_step(
        funcrl.logprob_fn(model), mesh=mesh, layout=layout_of(params), microbatch=microbatch
    )
    state = step.init(params)
    batch = own_rows(tiny_batch(rows=rows, dtype=torch.float32), mesh)
    written = funcrl.trace(step.update, state, batch)
    late = step_graph(step, state, batch, funcrl.CompileConfig(remat="full"))
    numbers = [
        sum(node.meta["val"].numel() for node in graph.graph.nodes
            if "all_gather_into_tensor" in str(node.target))
        for graph in (written, late)
    ]
    passes = len(batch.mask) // (microbatch or len(batch.mask))
    assert 1.9 * numbers[0] * passes < numbers[1] < 2.1 * numbers[0] * passes, numbers
    nbytes = sum(leaf.nbytes for leaf in params.values())
    held = sum(leaf.nbytes for leaf in funcrl.tree.leaves(state))
    return nbytes, held, predict_peak(written), predict_peak(late)


(few, held_few, written_few, late_few), (many, held_many, written_many, late_many) = (
    peaks(layers) for layers in (2, 4)
)
# The old state and the new one; as written, all parameters besides; else activations alone.
shards, whole = 2 * (held_many - held_few), many - few
assert written_many - written_few > shards + 0.9 * whole
assert late_many - late_few < shards + 0.25 * whole
# Of several micro-batches the gradients are added up a shard at a time, too.
(*_, late_few), (*_, late_many) = (peaks(layers, 4 * SIZE, microbatch=1) for layers in (2, 4))
assert late_many - late_few < shards + 0.25 * whole
plain = funcrl.trace(lambda x: x * 2, torch.ones(3))
assert gather_late(plain) is plain
"""


@pytest.mark.slow
def test_what_is_sent_is_what_the_arithmetic_says():
    paths = f"{ROOT}:{ROOT / 'tests' / 'helpers'}"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_whole_shape_is_counted_without_its_weights():
    """Of 3 layers: gathers of 2 passes, of 2 bytes a number; scatters of 4, a parameter each."""
    helper = ROOT / "tests" / "helpers" / "traffic.py"
    done = subprocess.run(
        [sys.executable, helper, "tiny"], env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=100, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    leaves = dict(Transformer(traffic.SHAPES["tiny"]).named_parameters())
    rows = {name: -(-len(leaf) // traffic.SIZE) for name, leaf in leaves.items()}
    whole = sum(traffic.SIZE * rows[name] * leaf[0].numel() for name, leaf in leaves.items())
    num_gathers, gathered_of, gathered = found["all_gather_into_tensor"]
    num_scatters, scattered, kept = found["reduce_scatter_tensor"]
    assert num_gathers == 2 * 3 + 3  # the layers, the embedding, and the norm beside it
    assert num_scatters == len(leaves)
    assert gathered == pytest.approx(2 * 2 * whole / 1e9)
    assert scattered == pytest.approx(4 * whole / 1e9)
    assert (gathered_of, kept) == (gathered / traffic.SIZE, scattered / traffic.SIZE)
    assert found["held"] == pytest.approx(12 * whole / traffic.SIZE / 1e9, rel=1e-2)
