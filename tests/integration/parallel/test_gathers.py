"""A step whose parameters are gathered layer by layer, on ranks that send."""

import pytest
from ranks import run_ranks

PROGRAM = """
import sys
from datetime import timedelta
import torch
from torch import distributed
import funcrl
from cases import tiny_model
from funcrl.graph import split_repeated, step_graph
from funcrl.graph.nodes import is_free, is_uncompiled
from funcrl.parallel import layout_of, make_mesh, own_rows
from rank_cases import rollout_of

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
    world_size=size, timeout=timedelta(seconds=200))
mesh = make_mesh(timeout=200.0, shard=size)
model = tiny_model(num_layers=2)
params = funcrl.init_params(model, seed=0)
model_fn = funcrl.logprob_fn(model, dtype=torch.bfloat16)


def batches():
    for seed in range(3):
        batch = funcrl.collate(rollout_of(seed), funcrl.grpo(kl=0.0))
        single = funcrl.tree.map(lambda x: x.float() if x.is_floating_point() else x, batch)
        yield own_rows(single, mesh)


step = funcrl.grpo_step(model_fn, mesh=mesh, layout=layout_of(params), microbatch=2)
first = step.init(params)
graph = step_graph(step, first, next(batches()), funcrl.CompileConfig(remat="full"))
late = eager = first
for batch in batches():
    eager, late = step(eager, batch)[0], graph(late, batch)[0]
for found, wanted in zip(funcrl.tree.leaves(late), funcrl.tree.leaves(eager), strict=True):
    assert torch.equal(found, wanted)
assert not torch.equal(eager.params["norm.weight"], first.params["norm.weight"])

# A layer's parameters travel together, in the dtype that they are read in, and not compiled.
sent = [
    node for node in graph.graph.nodes
    if "all_gather_into" in str(node.target) and is_uncompiled(node)
]
passes = len(next(batches()).tokens) // 2
assert len(sent) == passes * (2 * 2 + 3)  # two layers, the embedding and the norm
assert {node.meta["val"].dtype for node in sent} == {torch.bfloat16}
numbers = sum(node.meta["val"].numel() for node in sent)
assert 2 * passes * sum(leaf.numel() for leaf in params.values()) <= numbers
for piece in split_repeated(graph).children():
    computed = [n for n in piece.graph.nodes if n.op == "call_function" and not is_free(n)]
    assert len({is_uncompiled(node) for node in computed}) == 1
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_late_gathers_keep_every_bit(tmp_path):
    run_ranks(["-c", PROGRAM, tmp_path], 2)
