"""What a rank of 64 sends in a step with shared state, counted in the graph of a whole shape.

    python tests/helpers/traffic.py 0.6B 8B 32B

prints a line of JSON for each: the numbers of collectives of parameters and gradients, the GB that
they take in and give, and the largest result. The ranks do not exist, and no weight is made.
"""

import json
import sys
import warnings

import torch
from torch import distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import funcrl
from funcrl.graph.gathers import gather_late
from funcrl.graph.nodes import recorded_origin
from funcrl.models import TransformerConfig
from funcrl.parallel import Axis, Mesh

SIZE, RANK = 64, 3
QWEN3 = {"vocab_size": 151_936, "num_kv_heads": 8, "head_width": 128, "qk_norm": True}
SHAPES = {
    "tiny": TransformerConfig(vocab_size=640, width=128, num_layers=3, mlp_width=256),
    "0.6B": TransformerConfig(
        **QWEN3, width=1024, num_layers=28, num_heads=16, mlp_width=3072
    ),
    "8B": TransformerConfig(
        **QWEN3, width=4096, num_layers=36, num_heads=32, mlp_width=12_288, tied=False
    ),
    "32B": TransformerConfig(
        **QWEN3, width=5120, num_layers=64, num_heads=64, mlp_width=25_600, tied=False
    ),
}  # fmt: skip


def count(config):
    """Return what the collectives of a compiled step in bfloat16 take in and give."""
    with torch.device("meta"):
        model = funcrl.models.Transformer(config)
    layout = {name: tuple(leaf.shape) for name, leaf in model.named_parameters()}
    every = Axis(SIZE, RANK, distributed.group.WORLD.group_name)
    model_fn = funcrl.logprob_fn(model, dtype=torch.bfloat16)
    step = funcrl.grpo_step(model_fn, mesh=Mesh(shard=every, all=every), layout=layout)
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = step.init({name: torch.empty(shape) for name, shape in layout.items()})
        row = torch.zeros(1, 16)
        batch = funcrl.Batch(row.long(), row.long(), row > 0, row, row, row)
    graph = gather_late(funcrl.trace(step.update, state, batch)).graph
    found, largest = {}, 0
    for kind in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        target = getattr(torch.ops._c10d_functional, kind).default
        nodes = graph.find_nodes(op="call_function", target=target)
        pairs = [
            (node.args[0].meta["val"].nbytes, node.meta["val"].nbytes)
            for node in nodes
            if recorded_origin(node).is_sent  # those of metrics are not
        ]
        taken, given = (sum(each) / 1e9 for each in zip(*pairs, strict=True))
        found[kind] = [len(pairs), taken, given]
        largest = max(largest, *(given for _, given in pairs))
    held = sum(leaf.nbytes for leaf in funcrl.tree.leaves(state)) / 1e9
    return {**found, "largest": largest / 1e9, "held": held}


def main(names):
    warnings.simplefilter("ignore")
    distributed.init_process_group("fake", rank=RANK, world_size=SIZE, store=FakeStore())
    for name in names:
        print(json.dumps({"shape": name, **count(SHAPES[name])}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
