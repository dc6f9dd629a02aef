"""Layer 0: trees name the leaf, seeds are integers, checks speak for the caller."""

import pytest
import torch

import funcrl
from funcrl import rng, tree


def test_paths_name_dictionary_keys_fields_and_indices():
    batch = funcrl.Sample(torch.zeros(1), torch.zeros(1))
    assert tree.paths({"x": [batch]}) == ["x.0.tokens", "x.0.positions"]


def test_mismatched_trees_name_the_leaf():
    a, b = {"layer": {"w": 1, "b": 2}}, {"layer": {"w": 1}}
    with pytest.raises(ValueError, match=r"tree.map .*'layer.b'.* first"):
        tree.map(lambda x, y: x, a, b)
    with pytest.raises(ValueError, match=r"tree.add .*'layer.b'.* second"):
        tree.add(b, a)
    with pytest.raises(ValueError, match=r"tree.add .*structure.* nodes"):
        tree.add({"a": (1, 2)}, {"a": [1, 2]})


def test_shapes_that_would_be_broadcast_name_the_leaf():
    square, column = {"layer": {"w": torch.ones(2, 2)}}, {"layer": {"w": torch.ones(2, 1)}}
    with pytest.raises(ValueError, match=r"tree.add .*'layer.w'.*\[2, 1\]"):
        tree.add(square, column)
    with pytest.raises(ValueError, match="tree.add .*'layer.w'"):
        tree.add({"layer": {"w": torch.ones(())}}, square)
    assert torch.equal(tree.add(square, {"layer": {"w": 1.0}})["layer"]["w"], torch.full((2, 2), 2))
    with pytest.raises(ValueError, match=r"tree.scale .*factor.*\[2\]"):
        tree.scale(square, torch.ones(2))
    mapped = torch.func.vmap(tree.scale, in_dims=(None, 0))(square, torch.tensor([1.0, 3.0]))
    assert mapped["layer"]["w"].amax() == 3


def test_named_tuples_come_back():
    state = funcrl.TrainState({"w": torch.ones(1)}, (), torch.tensor(1), torch.tensor(0))
    assert isinstance(tree.map(torch.clone, state), funcrl.TrainState)


def test_norms_of_low_precision_are_summed_in_float32():
    # 2^16 entries of 1 in bfloat16: a bfloat16 sum would stop at 256.
    leaf = torch.ones(2**16, dtype=torch.bfloat16)
    assert tree.global_norm({"w": leaf}).item() == 256.0
    assert tree.global_norm({"w": leaf}).dtype == torch.float32
    with pytest.raises(ValueError, match="tree.global_norm .*empty"):
        tree.global_norm({})


def test_contiguous_lays_out_the_named_leaves_and_leaves_the_others_storage_alone():
    table = torch.arange(24.0).view(4, 6)
    params = {"a": {"w": table.T, "v": table[:, ::2]}, "b": [table.T, table], "c": table[:, 1:].T}
    laid = tree.contiguous(params, {"a.w", "b.1"})
    assert laid["a"]["w"].is_contiguous()
    assert torch.equal(laid["a"]["w"], table.T)
    for path, before, after in zip(
        tree.paths(params), tree.leaves(params), tree.leaves(laid), strict=True
    ):
        same_place = after.data_ptr() == before.data_ptr()
        assert (after is before, same_place) == ((path != "a.w"),) * 2
        assert torch.equal(before, after)
        assert after.stride() == before.stride() or path == "a.w"
    assert laid["b"][1].untyped_storage().data_ptr() == table.untyped_storage().data_ptr()
    assert tree.leaves(tree.contiguous(params, []))[0] is tree.leaves(params)[0]


@pytest.mark.parametrize("key", ["a", "a.x", "", "a.w.", 3])
def test_contiguous_names_a_key_that_is_no_leafs_path(key):
    params = {"a": {"w": torch.ones(2, 3).T}}
    with pytest.raises(ValueError, match=rf"such as \['a.w'\], got {key!r}\."):
        tree.contiguous(params, [key])


def test_contiguous_wants_paths_of_tensors():
    with pytest.raises(TypeError, match="contiguous expects keys to be a collection, got 'w'"):
        tree.contiguous({"w": torch.ones(2)}, "w")
    with pytest.raises(TypeError, match="tree.contiguous expects tensors alone in .* int at 'n'"):
        tree.contiguous({"n": 3}, ["n"])


def test_contiguous_is_traced_and_differentiated():
    x = torch.randn(3, 4)

    def f(x):
        return tree.contiguous({"a": x.T, "b": x.T}, ["a"])["a"].view(12).square().sum()

    assert torch.equal(torch.func.grad(f)(x), 2 * x)
    assert torch.equal(
        torch.func.vmap(torch.func.grad(f))(x.expand(2, 3, 4)), 2 * x.expand(2, 3, 4)
    )


def test_seeds_are_integers_from_integers_and_tensors():
    assert rng.fold_in(torch.tensor(3), 4) == rng.fold_in(3, torch.tensor(4))
    with pytest.raises(TypeError, match=r"fold_in .*data\[0\].* 0.5"):
        rng.fold_in(3, 0.5)
    with pytest.raises(TypeError, match="fold_in .*seed.* 'x'"):
        rng.fold_in("x")


def test_seeds_are_spread():
    seeds = {
        rng.fold_in(seed, step, i) for seed in range(10) for step in range(10) for i in range(10)
    }
    assert len(seeds) == 1000
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Each bit is set in about half of them: 500, and 5 deviations of sqrt(1000) / 2 are 79.
    for bit in range(63):
        assert abs(sum(seed >> bit & 1 for seed in seeds) - 500) < 79
    # One more, or another order, is another seed.
    assert len({rng.fold_in(0), rng.fold_in(0, 0), rng.fold_in(0, 0, 0)}) == 3
    assert rng.fold_in(0, 1, 2) != rng.fold_in(0, 2, 1)
    assert rng.fold_in(0, 1) == rng._splitmix64(rng._splitmix64(1)) >> 1  # which a run's bits need
    assert rng.fold_in(1 << 62) != rng.fold_in(0)


def test_splitmix64_is_the_published_one():
    # The first outputs of the generator seeded with 0 (the sequence of Vigna's splitmix64.c).
    gamma = 0x9E3779B97F4A7C15
    assert rng._splitmix64(0) == 0xE220A8397B1DCDAF
    assert rng._splitmix64(gamma) == 0x6E789E6AA1B965F4


def test_generators_are_their_seed():
    a, b = (
        torch.rand(4, generator=rng.generator(1, 2)),
        torch.rand(4, generator=rng.generator(1, 3)),
    )
    assert not torch.equal(a, b)
    assert torch.equal(a, torch.rand(4, generator=rng.generator(1, 2)))


def test_a_step_is_callable_and_a_pair():
    step = funcrl.Step(
        init=lambda params, seed=0: params, update=lambda state, batch: (state, batch)
    )
    assert step(1, 2) == (1, 2)
    assert step._fields == ("init", "update")
