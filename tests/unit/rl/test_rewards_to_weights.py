"""Advantages, rewards, aggregation and ratios: hand-computed values and refusals."""

from functools import partial

import pytest
import torch
from cases import random_case
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from funcrl import advantages, aggregation, losses, ratios, rewards, surrogates


def f64(*values):
    return torch.tensor(values, dtype=torch.float64)


def test_standardize_by_hand():
    # mean 2, squares 4 + 0 + 4 = 8, unbiased variance 8/2 = 4, deviation 2: (-1, 0, 1).
    assert torch.equal(advantages.standardize(f64(0, 2, 4), eps=0.0), f64(-1, 0, 1))
    # eps is added to the deviation: 2 / (2 + 2) = 0.5.
    assert torch.equal(advantages.standardize(f64(0, 2, 4), eps=2.0), f64(-0.5, 0, 0.5))


def test_equal_rewards_give_exactly_zero():
    # The float32 mean of seven 0.1 differs from 0.1: without care, an advantage of 0.007.
    same = torch.full((7,), 0.1)
    for fn in (advantages.center, advantages.standardize, advantages.leave_one_out):
        assert torch.equal(fn(same), torch.zeros(7))
    assert torch.equal(advantages.standardize(same, eps=0.0), torch.zeros(7))


def test_a_group_of_one():
    assert torch.equal(advantages.standardize(f64(3)), f64(0))
    assert torch.equal(advantages.center(f64(3)), f64(0))
    with pytest.raises(ValueError, match="leave_one_out .* 1"):
        advantages.leave_one_out(f64(3))


def test_leave_one_out_by_hand():
    # 1 - (2 + 6)/2 = -3;  2 - (1 + 6)/2 = -1.5;  6 - (1 + 2)/2 = 4.5.
    assert torch.allclose(advantages.leave_one_out(f64(1, 2, 6)), f64(-3, -1.5, 4.5), atol=1e-15)


def test_groups_may_be_interleaved_and_ragged():
    lifted = advantages.by_group(advantages.center)
    group = torch.tensor([7, 2, 7, 2, 2])
    assert torch.equal(lifted(f64(1, 0, 3, 3, 6), group), f64(-1, -3, 1, 0, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("fn", [advantages.center, advantages.leave_one_out,
                                partial(advantages.standardize, eps=1e-4)])  # fmt: skip
def test_groups_of_one_size_have_the_bits_of_each_alone(fn, dtype):
    generator = torch.Generator().manual_seed(0)
    for size in (2, 3, 8, 31, 200):
        rows = torch.randn(5, size, generator=generator).to(dtype)
        rows[1] = 0.1  # equal rewards, whose advantage is 0
        group = torch.arange(5).repeat(size)  # interleaved
        found = advantages.by_group(fn)(rows.t().flatten(), group)
        assert torch.equal(found.view(size, 5).t(), torch.stack([fn(row) for row in rows]))


def test_batch_scaling_uses_one_deviation():
    group = torch.tensor([0, 0, 1, 1])
    got = advantages.standardize_by_batch(f64(0, 2, 10, 14), group, eps=0.0)
    deviation = f64(0, 2, 10, 14).std()
    assert torch.allclose(got, f64(-1, 1, -2, 2) / deviation, atol=1e-15)


def by_definition(rewards, eps):
    """The float32 formula as it is written, for numbers whose squares are in range."""
    centered = rewards - rewards.mean()
    deviation = (centered.square().sum() / (len(rewards) - 1)).sqrt()
    return centered / (deviation + eps)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("eps", [0.0, 1e-6, 1e-4, 0.3])
def test_the_digits_of_ordinary_rewards_are_those_of_the_formula(dtype, eps):
    generator = torch.Generator().manual_seed(0)
    for size in (2, 3, 8, 31):
        for magnitude in (1e-8, 1e-3, 1.0, 7.0, 1e6):
            group = torch.randn(size, generator=generator, dtype=torch.float64) * magnitude
            group = (group + magnitude).to(dtype)
            whole = group.new_zeros(size, dtype=torch.int64)
            wanted = by_definition(group, eps)
            assert torch.equal(advantages.standardize(group, eps), wanted)
            assert torch.equal(advantages.standardize_by_batch(group, whole, eps), wanted)
            assert torch.equal(advantages.center(group), group - group.mean())


@pytest.mark.parametrize("magnitude", [1e-36, 1e-30, 1e-20, 1e19, 1e30, 3e38])
def test_rewards_of_any_size_have_their_advantages(magnitude):
    """Against float64, whose range holds every square of a float32."""
    rewards = torch.tensor([0.0, 1.0, 0.5, 0.25, 1.0, 0.75, 1.0, 1.0]) * magnitude
    group, wide = torch.zeros(8, dtype=torch.int64), rewards.double()
    for eps in (0.0, magnitude / 10):
        wanted = by_definition(wide, eps)
        for got in (
            advantages.standardize(rewards, eps),
            advantages.standardize_by_batch(rewards, group, eps),
        ):
            assert (got - wanted).abs().max() <= 1e-6
    center = advantages.center(rewards).double()
    assert (center - (wide - wide.mean())).abs().max() <= 1e-6 * magnitude
    rollout = random_case(prompts=2).rollout
    ones = torch.cat([rewards[:4], torch.full((4,), magnitude)])
    numbers = funcrl.metrics.describe_rollout(rollout._replace(rewards=ones), {"x": ones})
    assert numbers["frac_reward_zero_std"] == 0.5
    assert numbers["reward_std"] == pytest.approx(wide[:4].std().item() / 2)
    assert numbers["reward"] == numbers["rewards/x/mean"]
    assert numbers["reward"] == pytest.approx(ones.double().mean().item())
    assert numbers["rewards/x/std"] == pytest.approx(ones.double().std().item())


def test_advantages_of_large_rewards_under_vmap_and_in_a_trace():
    rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(1)) * 1e30
    wanted = torch.stack([advantages.standardize(row) for row in rows])
    assert wanted.abs().amax() > 0.5
    mapped = torch.func.vmap(lambda row: advantages.standardize(row))
    assert torch.equal(mapped(rows), wanted)
    assert torch.equal(make_fx(mapped)(rows)(rows), wanted)


@pytest.mark.parametrize("group", [torch.zeros(4), torch.full((4,), torch.nan), torch.ones(4) > 0])
def test_groups_are_integers(group):
    with pytest.raises(TypeError, match="by_group .*group.* torch.int64"):
        advantages.by_group(advantages.center)(torch.arange(4.0), group)
    with pytest.raises(TypeError, match="standardize_by_batch .*group.* torch.int64"):
        advantages.standardize_by_batch(torch.arange(4.0), group)
    rollout = random_case(prompts=2, samples=2).rollout._replace(group=group)
    for function in (
        lambda rollout: funcrl.collate(rollout, funcrl.grpo()),
        lambda rollout: funcrl.pack(rollout, funcrl.grpo(), 20),
        lambda rollout: funcrl.batching.pad_length(rollout, 4),
        funcrl.drop_zero_variance,
        funcrl.metrics.describe_rollout,
    ):
        with pytest.raises(TypeError, match="rollout.group.* torch.int64"):
            function(rollout)
    versions = torch.zeros(4)
    with pytest.raises(TypeError, match="rollout.policy_version.* torch.int64"):
        funcrl.collate(
            random_case(prompts=2, samples=2).rollout._replace(policy_version=versions),
            funcrl.grpo(),
        )


ROW, COLUMN = torch.zeros(3), torch.zeros(3, 1)
MASK = torch.ones(3, dtype=torch.bool)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("token", lambda: ratios.token(ROW, COLUMN, MASK)),
        ("sequence", lambda: ratios.sequence(ROW, COLUMN, MASK)),
        ("sequence", lambda: ratios.sequence(ROW, ROW, MASK[:, None])),
        (
            "corrected",
            lambda: ratios.corrected(ratios.token, lambda *x: x[0])(ROW, COLUMN, MASK, ()),
        ),
        ("truncated", lambda: ratios.truncated(2.0, "sequence")(ROW, MASK[:1], ())),
        ("clipped", lambda: surrogates.clipped()(ROW, ROW, COLUMN)),
        ("clipped_weight", lambda: surrogates.clipped_weight()(COLUMN, ROW, ROW)),
        ("soft_gate", lambda: surrogates.soft_gate()(ROW, ROW, COLUMN)),
        ("score_function", lambda: surrogates.score_function(ROW, ROW, COLUMN)),
        ("with_kl_gradient", lambda: losses.with_kl_gradient(losses.k1)(ROW, COLUMN, ROW)),
    ],
)
def test_columns_are_not_broadcast_to_squares(name, call):
    with pytest.raises(ValueError, match=f"^{name} .* shape"):
        call()


def test_weights_by_hand():
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]], dtype=torch.bool)
    one = mask.double()
    double = torch.float64
    # 4 tokens; 2 sequences of 3 and 1 tokens: the masked row is not a sequence.
    assert torch.equal(aggregation.token_mean(mask, double), one / 4)
    assert torch.equal(aggregation.sequence_mean(mask, double), one / f64(6, 2, 1)[:, None])
    assert torch.equal(aggregation.constant(mask, 5, double), one / 10)


@pytest.mark.parametrize(
    "rule",
    [aggregation.token_mean, aggregation.sequence_mean, lambda m: aggregation.constant(m, 3)],
)
def test_nothing_sampled_has_weight_zero(rule):
    assert torch.equal(rule(torch.zeros(2, 3, dtype=torch.bool)), torch.zeros(2, 3))


def test_weights_refuse_bad_masks():
    with pytest.raises(TypeError, match="token_mean .*mask.* torch.bool"):
        aggregation.token_mean(torch.zeros(2, 3))
    with pytest.raises(ValueError, match="sequence_mean .*mask.* shape"):
        aggregation.sequence_mean(torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ValueError, match="constant .*length"):
        aggregation.constant(torch.zeros(2, 3, dtype=torch.bool), 0)


def test_several_rewards():
    named = {"right": f64(1, 0), "format": f64(1, 1)}
    assert torch.equal(rewards.weighted_sum(named), f64(2, 1))
    assert torch.equal(rewards.weighted_sum(named, {"right": 2.0, "format": -1.0}), f64(1, -1))
    with pytest.raises(ValueError, match="weighted_sum .*weights"):
        rewards.weighted_sum(named, {"x": 1.0})
    with pytest.raises(ValueError, match="weighted_sum .* nan .*'format'.* row 1"):
        rewards.weighted_sum({"right": f64(1, 0), "format": f64(1, float("nan"))})
    with pytest.raises(ValueError, match="weighted_sum .*reward"):
        rewards.weighted_sum({})


def test_soft_overlong_by_hand():
    # Allowed up to 8, then (8 - length) / 4 until -1 at 12.
    lengths = torch.tensor([8, 9, 11, 12, 99])
    assert torch.equal(
        rewards.soft_overlong(lengths, max_length=12, cache=4),
        torch.tensor([0.0, -0.25, -0.75, -1.0, -1.0]),
    )
    # Of a cache of one token, the last one before the limit is free.
    at_once = rewards.soft_overlong(torch.tensor([11, 12]), max_length=12, cache=1)
    assert at_once.tolist() == [0.0, -1.0]
    with pytest.raises(ValueError, match="soft_overlong .*cache"):
        rewards.soft_overlong(lengths, max_length=12, cache=13)


def test_sequence_ratio_by_hand():
    # Over the two sampled tokens: exp((log 4 + log 1) / 2) = 2, at every position of the row.
    mask = torch.tensor([False, True, True])
    ratio = ratios.sequence(f64(9, 4, 1).log(), f64(1, 1, 1).log(), mask).ratio
    assert torch.allclose(ratio, f64(2, 2, 2), atol=1e-15)


def test_sequence_ratio_of_segments():
    segments = torch.tensor([0, 0, 1, 1, -1])
    mask = torch.tensor([True, True, False, True, False])
    ratio = ratios.sequence(
        f64(4, 1, 7, 3, 5).log(), f64(1, 1, 1, 1, 1).log(), mask, segments
    ).ratio
    assert torch.allclose(ratio[:4], f64(2, 2, 3, 3), atol=1e-15)


def test_corrections_by_hand():
    log_ratio, mask = f64(4, 0.5, 8).log(), torch.tensor([True, True, False])
    assert torch.allclose(ratios.truncated(3.0)(log_ratio, mask, ()), f64(3, 0.5, 3))
    by_sequence = ratios.truncated(3.0, level="sequence")(log_ratio, mask, ())
    assert torch.allclose(by_sequence, f64(2, 2, 2))  # 4 * 0.5; the third is not sampled
    kept = ratios.masked(3.0, floor=0.6, level="token")(log_ratio, mask, ())
    assert torch.equal(kept, f64(0, 0, 0))
    with pytest.raises(ValueError, match="truncated .*cap"):
        ratios.truncated(0)
    with pytest.raises(ValueError, match="masked .*level"):
        ratios.masked(level="row")


def test_top_entropy_counts_over_the_whole_batch():
    mask = torch.tensor([[False, True, True, True], [False, True, True, True]])
    entropy = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 4.0, 5.0, 6.0]])
    ones = torch.ones(2, 4)
    tokens = torch.arange(8).view(2, 4)  # rows of equal tokens would tie
    batch = funcrl.Batch(tokens, ones.long(), mask, ones, ones, ones)
    for fraction, kept in ((0.0, 0), (0.01, 1), (0.5, 3), (0.51, 4), (1.0, 6)):
        got = funcrl.top_entropy(fraction)(funcrl.TokenScores(ones, entropy), batch).advantages
        assert got.sum() == kept, fraction
        assert got[1, 3] == (kept > 0)
