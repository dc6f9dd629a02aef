"""Collectives of two and three processes: values, derivatives, and what is refused."""

import pytest
import torch
from ranks import run_ranks

import funcrl
from funcrl.parallel import all_gather, broadcast, pmax, psum, psum_scatter
from funcrl.parallel.mesh import ALONE

PROGRAM = """
import sys
from datetime import timedelta
import pytest, torch
from torch import distributed
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from funcrl.parallel import *
from funcrl.parallel.trees import _BUCKET

folder, rank, size = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank,
    world_size=size, timeout=timedelta(seconds=100))
mesh = make_mesh(timeout=100.0)
axis = mesh.all
assert (axis.size, axis.rank) == (size, rank)
ranks = [torch.arange(4.0).double() + each for each in range(size)]
x, whole = ranks[rank], torch.stack(ranks)


def equal(a, b):
    assert torch.equal(a, b), (a, b)


# Values, in several dtypes, alone, under vmap and traced.
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64):
    equal(psum(x.to(dtype), axis), whole.to(dtype).sum(0))
    equal(pmax(x.to(dtype), axis), whole.to(dtype).amax(0))
    equal(all_gather(x.to(dtype), axis), whole.to(dtype).flatten())
    equal(broadcast(x.to(dtype), axis), whole[0].to(dtype))
equal(all_gather(x > 1, axis), (whole > 1).flatten())
square = x[:, None] * torch.ones(6).double()
wide = [each[:, None] * torch.ones(6).double() for each in ranks]
equal(all_gather(square, axis, -1), torch.cat(wide, 1))
equal(psum_scatter(square, axis, 1), whole.sum(0)[:, None].expand(4, 6 // size))
equal(psum_scatter(square.T, axis), whole.sum(0).expand(6 // size, 4))
for trial in range(20):  # torch's own all_reduce is wrong under vmap in half of such runs
    equal(vmap(lambda row: psum(row * 2, axis))(square), 2 * whole.sum(0)[:, None].expand(4, 6))
by_column = vmap(lambda column: all_gather(column, axis), in_dims=1, out_dims=1)
equal(by_column(square), all_gather(square, axis))
assert gather_objects({"rank": rank}, mesh.host) == [{"rank": each} for each in range(size)]
assert gather_objects(rank, mesh.rollouts) == list(range(size))

# A gather's derivative is the part of the sum of all ranks' gradients, and back.
p = torch.linspace(0, 1, 6).view(2, 3).double()
factor = sum(range(1, size + 1))
gathered = lambda p: (all_gather(p, axis, 1) ** 2 * (rank + 1)).sum()
equal(grad(gathered)(p), 2 * p * factor)
equal(make_fx(grad(gathered))(p)(p), 2 * p * factor)
each = vmap(grad(lambda p, s: (all_gather(p, axis, 1) ** 2).sum() * s), in_dims=(None, 0))
equal(each(p, torch.tensor([1.0, 2.0]).double()), torch.stack([2 * p, 4 * p]) * size)
q = torch.ones(2 * size, 2).double()
scattered = lambda q: (psum_scatter(q, axis) * (rank + 1)).sum()
wanted = torch.arange(1.0, size + 1).double().repeat_interleave(2)[:, None].expand(-1, 2)
equal(grad(scattered)(q), wanted)

# What would be silently wrong raises.
for wrong in (psum, pmax):
    for transform in (grad, lambda fn: make_fx(grad(fn))):
        with pytest.raises(RuntimeError, match=f"^{wrong.__name__} expects to be outside"):
            transform(lambda p: wrong(p, axis).sum())(p)
with pytest.raises(ValueError, match="psum_scatter expects a dimension that .* got 5"):
    psum_scatter(torch.ones(5), axis) if size != 5 else None
with pytest.raises(ValueError, match="all_gather expects a dimension of .2, 3., got 2"):
    all_gather(p, axis, 2)

# Trees: in buckets of a dtype, with a leaf that is larger than a bucket.
tree = {"a": torch.ones(3), "b": torch.ones(2, 2).double(), "c": torch.ones(_BUCKET // 4 + 1),
        "d": torch.ones(()).bfloat16(), "e": torch.full((2,), 2.0)}
summed = psum_tree({name: leaf * (rank + 1) for name, leaf in tree.items()}, axis)
for name, leaf in tree.items():
    equal(summed[name], leaf * factor)
    assert summed[name].dtype == leaf.dtype
    assert summed[name].untyped_storage().nbytes() == summed[name].nbytes
part = torch.tensor([1e8, 3.0, -1e8][rank])  # (1e8 + 3) - 1e8 is 0 in float32
equal(pairwise_psum_tree({"w": part}, axis)["w"], torch.tensor({2: 1e8, 3: 0.0}[size]))
sent = {"w": x, "n": torch.tensor(rank)}
equal(broadcast_tree(sent, axis)["w"], whole[0])
distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_of_several_processes(tmp_path):
    run_ranks(["-c", PROGRAM, tmp_path], 3)


def test_of_one_process_is_the_identity():
    x = torch.ones(2, 3)
    for collective in (psum, pmax, all_gather, psum_scatter, broadcast):
        assert collective(x, ALONE.data) is x
    graph = funcrl.trace(lambda x: psum(x, ALONE.data) * 2, x)
    assert not [node for node in graph.graph.nodes if "c10d" in str(node.target)]
