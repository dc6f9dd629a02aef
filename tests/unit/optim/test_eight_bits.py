"""Adam with moments in eight bits: a literal loop, bitsandbytes' levels, rows that stand alone."""

import math

import bitsandbytes.functional
import pytest
import torch

import funcrl
from funcrl import optim
from funcrl.config import AlgorithmConfig, OptimizerConfig, TrainConfig
from funcrl.loop.memory import estimate_memory
from funcrl.optim.eight_bits import dynamic_levels

CPU = torch.device("cpu")


def grads_of(step, shape=(3, 128)):
    """Gradients of many magnitudes, some of them 0."""
    draw = torch.Generator().manual_seed(step)
    values = torch.randn(shape, generator=draw) * 10 ** (3 * torch.rand(shape, generator=draw) - 3)
    return values * (torch.rand(shape, generator=draw) > 0.1)


@pytest.mark.parametrize("is_signed", [True, False])
def test_levels_are_those_of_bitsandbytes(is_signed):
    found = dynamic_levels(is_signed, CPU)
    wanted = bitsandbytes.functional.create_dynamic_map(signed=is_signed)
    assert (found - wanted).abs().max() <= 2**-24  # a rounding below 1
    assert len(found.unique()) == 256
    assert found[-1] == 1


def stored(value, scale, levels, is_square):
    """The level of a number by comparison with all 256."""
    if scale == 0:
        return None
    share = value / scale
    near = [level for level in levels if level > 0 or not is_square or share == 0]
    return min(near, key=lambda level: abs(level - share))


def test_updates_and_moments_are_those_of_a_literal_loop():
    """Blocks of 128 numbers: 256 does not divide the row."""
    b1, b2, eps = 0.9, 0.99, 1e-8
    tx = optim.scale_by_adam_8bit((b1, b2), eps)
    state = tx.init({"w": torch.zeros(3, 128)})
    signed, positive = (dynamic_levels(each, CPU).tolist() for each in (True, False))
    mean, square = ([[0.0] * 128 for _ in range(3)] for _ in range(2))
    for step in range(1, 6):
        grads = grads_of(step)
        updates, state = tx.update({"w": grads}, state, {})
        for row in range(3):
            for place in range(128):
                grad = grads[row, place].item()
                mean[row][place] += (1 - b1) * (grad - mean[row][place])
                square[row][place] = b2 * square[row][place] + (1 - b2) * grad * grad
                root = math.sqrt(square[row][place] / (1 - b2**step)) + eps
                wanted = mean[row][place] / (1 - b1**step) / root
                assert updates["w"][row, place].item() == pytest.approx(wanted, rel=1e-5, abs=1e-6)
            for values, levels, found, is_square in (
                (mean[row], signed, state.mean, False), (square[row], positive, state.square, True),
            ):  # fmt: skip
                scale = max(map(abs, values))
                assert found.scales["w"][row].item() == pytest.approx(scale, rel=1e-5)
                codes = found.codes["w"][row].tolist()
                for place in range(128):
                    own = levels[codes[place]]
                    best = stored(values[place], scale, levels, is_square)
                    # The share is rounded by at most 2^-8 of it before, which counts twice.
                    share = values[place] / scale
                    assert abs(own - share) <= abs(best - share) + 2**-7 * abs(share)
                    assert (own > 0) == (values[place] > 0)
                    values[place] = own * found.scales["w"][row].item()
    assert len(state.mean.codes["w"].unique()) > 60


def test_leaves_without_long_rows_have_the_bits_of_float32():
    params = {"norm": torch.ones(256), "conv": torch.ones(8, 1, 4), "odd": torch.ones(4, 100)}
    plain, small = optim.adamw(1e-2), optim.adamw(1e-2, moment_dtype="8bit")
    states = [tx.init(params) for tx in (plain, small)]
    for step in range(4):
        grads = {name: grads_of(step, leaf.shape) for name, leaf in params.items()}
        for index, tx in enumerate((plain, small)):
            updates, states[index] = tx.update(grads, states[index], params)
            if index == 0:
                wanted = updates
        for name, leaf in updates.items():
            assert torch.equal(leaf, wanted[name])


def test_rows_of_a_matrix_have_the_bits_that_they_have_alone():
    """So that ranks which share a state, each with some rows, hold the one of a single process."""
    tx = optim.adamw(1e-2, moment_dtype="8bit")
    whole, parts = torch.ones(6, 512), [slice(0, 4), slice(4, 6)]
    state, states = tx.init({"w": whole}), [tx.init({"w": whole[part]}) for part in parts]
    for step in range(5):
        grads = grads_of(step, (6, 512))
        updates, state = tx.update({"w": grads}, state, {"w": whole})
        for index, part in enumerate(parts):
            own = {"w": whole[part]}
            found, states[index] = tx.update({"w": grads[part]}, states[index], own)
            assert torch.equal(found["w"], updates["w"][part])


def test_bad_moments_are_refused_and_nan_is_seen():
    with pytest.raises(ValueError, match="adamw expects moment_dtype"):
        optim.adamw(1e-3, moment_dtype="4bit")
    with pytest.raises(
        ValueError, match="--optimizer.name adamw with --optimizer.moments 8bit, go"
    ):
        TrainConfig(optimizer=OptimizerConfig(name="sgd", moments="8bit"))
    tx = optim.skip_nonfinite(optim.adamw(1e-3, moment_dtype="8bit"))
    params = {"w": torch.ones(2, 64)}
    state = tx.init(params)
    grads = {"w": torch.ones(2, 64)}
    grads["w"][1, 3] = torch.nan
    updates, skipped = tx.update(grads, state, params)
    assert skipped.num_skipped == 1
    assert not updates["w"].any()
    with pytest.raises(ValueError, match="scale_by_adam_8bit expects gradients of the shapes"):
        optim.scale_by_adam_8bit().update({"w": torch.ones(3, 64)}, state.inner[0], params)


def test_a_dry_run_counts_them():
    """Within a hundredth of the bytes of a state, of a shape without memory."""
    shape = funcrl.models.shape("qwen3-0.6b", 151936)
    weights = dict(funcrl.models.Transformer(shape).named_parameters())
    state = optim.adamw(1e-3, moment_dtype="8bit").init(weights)
    held = sum(leaf.nbytes for leaf in funcrl.tree.leaves(state))
    options = {"algorithm": AlgorithmConfig(kl=0.0), "optimizer": OptimizerConfig(moments="8bit")}
    estimate = estimate_memory(TrainConfig(**options), shape, 64)
    assert estimate.optimizer == pytest.approx(held, rel=0.01)
    plain = estimate_memory(TrainConfig(algorithm=AlgorithmConfig(kl=0.0)), shape, 64)
    assert estimate.optimizer < 0.26 * plain.optimizer
    assert plain.checkpoint == 3 * plain.parameters
