"""Every algorithm against its paper, written as loops; and each against the others."""

import warnings

import oracles
import pytest
import torch
from cases import Case, random_case, table_model
from torch.func import grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl

PAPERS = {
    "grpo": (funcrl.grpo(), oracles.grpo),
    "grpo, kl and entropy": (
        funcrl.grpo(kl=0.04, entropy=0.01),
        lambda x: oracles.grpo(x, kl=0.04, entropy=0.01),
    ),
    "grpo, clip-higher": (funcrl.grpo(clip=(0.1, 0.3)), lambda x: oracles.grpo(x, 0.1, 0.3)),
    "grpo, dual clip": (funcrl.grpo(dual_clip=1.3), lambda x: oracles.dual_clip(x, 1.3)),
    "grpo, by sequence": (
        funcrl.grpo(level="sequence", clip=(0.05, 0.1)),
        lambda x: oracles.gspo(x, 0.05, 0.1),
    ),
    "dapo, dual clip": (funcrl.dapo(dual_clip=1.3), lambda x: oracles.dapo(x, dual=1.3)),
    "dr_grpo, its length": (funcrl.dr_grpo(length=7), lambda x: oracles.dr_grpo(x, 7.0)),
    "sapo, its temperatures": (
        funcrl.sapo(temperature=(0.5, 3.0)),
        lambda x: oracles.sapo(x, 0.5, 3.0),
    ),
    "dr_grpo": (funcrl.dr_grpo(), oracles.dr_grpo),
    "dapo": (funcrl.dapo(), oracles.dapo),
    "gspo": (funcrl.gspo(), oracles.gspo),
    "gspo, wide": (funcrl.gspo(clip=(0.05, 0.1)), lambda x: oracles.gspo(x, 0.05, 0.1)),
    "cispo": (funcrl.cispo(), oracles.cispo),
    "cispo, tight": (funcrl.cispo(clip=(0.1, 0.1)), lambda x: oracles.cispo(x, 0.1, 0.1)),
    "sapo": (funcrl.sapo(), oracles.sapo),
    "rloo": (funcrl.rloo(), oracles.rloo),
    "reinforce": (funcrl.reinforce(), oracles.reinforce),
}
for _name in ("grpo", "dapo", "gspo", "cispo", "sapo"):
    for _scale, _advantage in (("none", oracles.centered), ("batch", oracles.scaled_by_batch)):
        PAPERS[f"{_name}, scaled by {_scale}"] = (
            getattr(funcrl, _name)(scale_rewards=_scale),
            lambda x, name=_name, advantage=_advantage: getattr(oracles, name)(
                x, advantage=advantage
            ),
        )
for _estimator in ("k1", "k2", "k3"):
    PAPERS[f"grpo, {_estimator}"] = (
        funcrl.grpo(kl=0.3, kl_estimator=_estimator),
        lambda x, name=_estimator: oracles.grpo(x, kl=0.3, estimator=getattr(oracles, name)),
    )
for _estimator in ("k1", "k3"):
    PAPERS[f"grpo, {_estimator}+"] = (
        funcrl.grpo(kl=0.3, kl_estimator=f"{_estimator}+"),
        lambda x, name=_estimator: oracles.grpo_with_kl_gradient(x, 0.3, getattr(oracles, name)),
    )
for _level in ("token", "sequence"):
    for _bound in ("truncated", "masked"):
        PAPERS[f"grpo, {_bound} by {_level}"] = (
            funcrl.grpo(correction=getattr(funcrl.ratios, _bound)(1.1, level=_level)),
            lambda x, level=_level, bound=_bound: oracles.corrected(x, level, bound, 1.1),
        )


def batch_of(case: Case, algorithm: funcrl.Algorithm) -> funcrl.Batch:
    return funcrl.collate(case.rollout, algorithm, case.ref_logprobs)


def summed_loss(algorithm, params, batch):
    def sample_loss(params, sample):
        return funcrl.policy_loss(algorithm, table_model(params, sample), sample)[0]

    return vmap(sample_loss, in_dims=(None, 0))(params, batch).sum()


def eager(algorithm, params, batch):
    return grad_and_value(lambda p: summed_loss(algorithm, p, batch))(params)


def row_by_row(algorithm, params, batch):
    """No vmap at all: one sample after the other."""
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
    loss = 0
    for i in range(batch.tokens.shape[0]):
        sample = funcrl.tree.map(lambda leaf, i=i: leaf[i], batch)
        loss = loss + funcrl.policy_loss(algorithm, table_model(leaves, sample), sample)[0]
    loss.backward()
    grads = {
        name: torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        for name, leaf in leaves.items()
    }
    return grads, loss.detach()


def traced(algorithm, params, batch):
    return make_fx(lambda p, b: eager(algorithm, p, b))(params, batch)(params, batch)


def compiled(algorithm, params, batch):
    graph = make_fx(lambda p, b: eager(algorithm, p, b))(params, batch)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch's own, about its imports
        return torch.compile(graph, backend="aot_eager")(params, batch)


def per_sample(algorithm, params, batch):
    def sample_loss(params, sample):
        return funcrl.policy_loss(algorithm, table_model(params, sample), sample)[0]

    grads = funcrl.per_sample_grad(sample_loss)(params, batch)
    return funcrl.tree.map(lambda leaf: leaf.sum(0), grads), summed_loss(algorithm, params, batch)


VARIANTS = (eager, row_by_row, per_sample, traced)


def check(name: str, case: Case, variant, tolerance: float) -> None:
    check_against(*PAPERS[name], case, variant, tolerance)


def check_against(algorithm, oracle, case: Case, variant, tolerance: float) -> None:
    inputs = oracles.Inputs(case)
    expected = oracle(inputs)
    (expected_grad,) = torch.autograd.grad(expected, inputs.logprobs)
    grads, loss = variant(algorithm, case.params, batch_of(case, algorithm))
    # Errors of a sum are relative to the sum of its terms' sizes; gradients are those terms.
    scale = max(1.0, expected_grad.abs().sum().item())
    assert abs(loss.item() - expected.item()) <= tolerance * scale
    assert (grads["logprobs"].double() - expected_grad).abs().max().item() <= tolerance * scale
    assert expected_grad.abs().max() > 0


@pytest.mark.slow
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("name", PAPERS)
def test_equals_the_paper_in_float64(name, variant):
    for seed in range(2):
        check(name, random_case(seed), variant, 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("name", PAPERS)
def test_equals_the_paper_in_float32(name):
    for seed in range(5):
        check(name, random_case(seed, dtype=torch.float32), eager, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["grpo, kl and entropy", "gspo", "cispo", "rloo"])
def test_equals_the_paper_compiled(name):
    check(name, random_case(7), compiled, 1e-12)


@pytest.mark.slow
def test_far_from_the_sampling_policy():
    """With ratios from 0.05 to 20 every clip is active."""
    for name in PAPERS:
        check(name, random_case(1, spread=3.0), eager, 1e-11)


def no_number_at_zero(logprobs, ratio, advantages):
    """|A| r, written so that an advantage of 0 gives 0 / 0."""
    return funcrl.types.Surrogate(advantages**2 / advantages.abs() * ratio)


def no_slope_at_one(logprobs, ratio, advantages):
    """A sqrt|r - 1|, whose slope at a ratio of 1 is infinite."""
    return funcrl.types.Surrogate(advantages * (ratio - 1).abs().sqrt())


def distance(logprobs, ref_logprobs):
    """|log pi - log ref|, 0 / 0 where both are equal."""
    return (logprobs - ref_logprobs) ** 2 / (logprobs - ref_logprobs).abs()


SURROGATES = {
    no_number_at_zero: lambda ratio, advantage: advantage.abs() * ratio,
    no_slope_at_one: lambda ratio, advantage: advantage * (ratio - 1).abs() ** 0.5,
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("level", "variant"),
    [*(("token", variant) for variant in VARIANTS), ("sequence", eager), ("sequence", compiled)],
)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_what_a_users_function_is_outside_the_mask_does_not_matter(surrogate, level, variant):
    """Not a number there, or of an infinite slope: neither gets into the loss or its gradient."""

    def oracle(x):
        loss = x.zero()
        for i in x.sequences:
            advantage = oracles.standardized(x.rewards, x.group, i)
            whole = torch.exp(oracles.mean([x.ratio(i, t).log() for t in x.rows[i]]))
            for t in x.rows[i]:
                ratio = x.ratio(i, t) if level == "token" else whole
                kl = (x.logprobs[i, t] - x.ref[i, t]).abs()
                term = 0.1 * kl - SURROGATES[surrogate](ratio, advantage)
                loss = loss + term / len(x.rows[i]) / len(x.sequences)
        return loss

    made = funcrl.grpo(level=level, kl=0.1, kl_estimator=distance)._replace(surrogate=surrogate)
    for seed in range(3):
        case = random_case(seed)
        rewards = torch.randn(12, generator=funcrl.rng.generator(seed), dtype=torch.float64)
        case = case._replace(rollout=case.rollout._replace(rewards=rewards))
        check_against(made, oracle, case, variant, 1e-12)
        step = funcrl.grpo_step(table_model, algorithm=made)
        new, metrics = step(step.init(case.params), batch_of(case, made))
        assert all(leaf.isfinite().all() for leaf in funcrl.tree.leaves((new, metrics)))
        assert metrics.last["num_skipped_updates"] == 0
        assert metrics.means["clip_ratio/region_mean"] == 0  # a surrogate that names no clipping


def both(first, second, case):
    return [
        eager(algorithm, case.params, batch_of(case, algorithm)) for algorithm in (first, second)
    ]


def same(first, second, tolerance=1e-14):
    (grads, loss), (other_grads, other_loss) = first, second
    assert abs(loss - other_loss) <= tolerance
    assert (grads["logprobs"] - other_grads["logprobs"]).abs().max() <= tolerance


def test_gspo_of_single_tokens_is_grpo():
    case = random_case(3, completion=1)
    same(*both(funcrl.gspo(clip=(0.2, 0.2)), funcrl.grpo(), case))


def test_dapo_of_equal_lengths_is_grpo():
    case = random_case(4, completion=5)
    same(*both(funcrl.dapo(clip=(0.2, 0.2)), funcrl.grpo(), case))


def test_dr_grpo_is_grpo_of_its_own_length_without_deviation():
    case = random_case(5, completion=5)
    same(*both(funcrl.dr_grpo(length=5), funcrl.grpo(scale_rewards="none"), case))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "sapo", "dr_grpo"])
def test_on_policy_every_ratio_gives_the_gradient_of_reinforce(name):
    case = random_case(6, spread=0.0)
    case.params["logprobs"].copy_(case.rollout.behavior_logprobs)
    algorithm = PAPERS[name][0]
    baseline = funcrl.reinforce(advantage=algorithm.advantage, weight=algorithm.weight)
    first, second = both(algorithm, baseline, case)
    assert (first[0]["logprobs"] - second[0]["logprobs"]).abs().max() <= 1e-15


def test_rloo_is_reinforce_with_its_baseline():
    lifted = funcrl.advantages.by_group(funcrl.advantages.leave_one_out)
    same(*both(funcrl.rloo(), funcrl.reinforce(advantage=lifted), random_case(8)))


def test_clip_of_hand_computed_numbers():
    # r = 0.5/0.4 = 1.25 is clipped to 1.2: 1.2 * 2 = 2.4; r = 0.3/0.4 = 0.75 with A = -1 is
    # clipped to 0.8: -0.8; r = 1 with A = 1: 1. Weights 1/3: loss = -(2.4 - 0.8 + 1) / 3.
    sample = funcrl.Batch(
        tokens=torch.tensor([1, 2, 3, 4]),
        positions=torch.arange(4),
        mask=torch.tensor([False, True, True, True]),
        behavior_logprobs=torch.tensor([1.0, 0.4, 0.4, 0.5]).log().double(),
        advantages=torch.tensor([0.0, 2.0, -1.0, 1.0], dtype=torch.float64),
        token_weights=torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64) / 3,
    )
    logprobs = torch.tensor([1.0, 0.5, 0.3, 0.5], dtype=torch.float64).log()
    scores = funcrl.TokenScores(logprobs, torch.tensor([9.0, 1.0, 2.0, 3.0]))
    loss, metrics = funcrl.policy_loss(funcrl.grpo(), scores, sample)
    assert abs(loss.item() + 2.6 / 3) < 1e-7  # behaviour log-probs were rounded to float32
    assert metrics.sums["clip_ratio/high_mean"] == 1
    assert metrics.sums["clip_ratio/low_mean"] == 1
    assert metrics.sums["clip_ratio/region_mean"] == 2
    assert metrics.sums["entropy"] == 6


def clip_metrics(algorithm, ratio, advantages):
    count = len(ratio)
    logprobs = torch.tensor([1.0, *ratio], dtype=torch.float64).log() - 3
    sample = funcrl.Batch(
        tokens=torch.zeros(count + 1, dtype=torch.int64),
        positions=torch.arange(count + 1),
        mask=torch.arange(count + 1) > 0,
        behavior_logprobs=torch.full((count + 1,), -3.0, dtype=torch.float64),
        advantages=torch.tensor([0.0, *advantages], dtype=torch.float64),
        token_weights=torch.ones(count + 1, dtype=torch.float64),
    )
    scores = funcrl.TokenScores(logprobs, torch.zeros_like(logprobs))
    sums = funcrl.policy_loss(algorithm, scores, sample)[1].sums
    return [sums[f"clip_ratio/{side}_mean"].item() for side in ("low", "high", "region")]


def test_clip_metrics_by_hand():
    # PPO stops a gradient only on the side that the advantage pushes to: 0.5 at A < 0 is low,
    # 1.5 at A > 0 is high (twice), 0.5 at A > 0 and 4 at A < 0 are neither.
    ratio, advantages = [0.5, 1.5, 1.5, 0.5, 4.0], [-1.0, 1.0, 1.0, 1.0, -1.0]
    assert clip_metrics(funcrl.grpo(), ratio, advantages) == [1, 2, 3]
    # Dual clip stops the last one, too.
    assert clip_metrics(funcrl.grpo(dual_clip=3.0), ratio, advantages) == [1, 3, 4]
    # CISPO bounds the weight whatever the advantage: below 0.9 twice, above 1.1 three times.
    assert clip_metrics(funcrl.cispo(clip=(0.1, 0.1)), ratio, advantages) == [2, 3, 5]
    assert clip_metrics(funcrl.sapo(), ratio, advantages) == [0, 0, 0]


def test_the_reported_kl_is_the_estimator():
    case = random_case(0)
    for name in ("k1", "k2", "k3"):
        algorithm = funcrl.grpo(kl=0.1, kl_estimator=name)
        step = funcrl.grpo_step(table_model, algorithm=algorithm)
        _, metrics = step(step.init(case.params), batch_of(case, algorithm))
        values = getattr(funcrl.losses, name)
        mask = case.rollout.mask
        expected = values(case.params["logprobs"][mask], case.ref_logprobs[mask]).mean()
        assert abs(metrics.means["kl"] - expected) <= 1e-14


def test_kl_of_hand_computed_numbers():
    # pi = 1/2, ref = 1/4: k1 = log 2, k2 = (log 2)^2 / 2, k3 = 1/2 - 1 + log 2.
    logprobs, ref = torch.tensor([0.5]).double().log(), torch.tensor([0.25]).double().log()
    log2 = 0.6931471805599453
    assert abs(funcrl.losses.k1(logprobs, ref).item() - log2) < 1e-15
    assert abs(funcrl.losses.k2(logprobs, ref).item() - log2**2 / 2) < 1e-15
    assert abs(funcrl.losses.k3(logprobs, ref).item() - (log2 - 0.5)) < 1e-15


def test_tunables_are_refused_by_name():
    with pytest.raises(TypeError, match="dapo .*kl.* got 'beta'"):
        funcrl.dapo(beta=0.1)
    with pytest.raises(ValueError, match="grpo .*kl_estimator"):
        funcrl.grpo(kl_estimator="k9")
    with pytest.raises(ValueError, match="grpo .*level"):
        funcrl.grpo(level="word")
    with pytest.raises(ValueError, match="gspo .*scale_rewards"):
        funcrl.gspo(scale_rewards="std")
    with pytest.raises(ValueError, match="clipped .*dual_clip"):
        funcrl.grpo(dual_clip=1.0)
    with pytest.raises(ValueError, match="clipped .*low"):
        funcrl.grpo(clip=(-0.1, 0.2))
    with pytest.raises(TypeError, match="grpo .*clip"):
        funcrl.grpo(clip=0.2)
    with pytest.raises(TypeError, match="sapo .*temperature"):
        funcrl.sapo(temperature=(1.0, 2.0, 3.0))
    with pytest.raises(TypeError, match="rloo .*correction"):
        funcrl.rloo(correction=3.0)
    case, algorithm = random_case(), funcrl.grpo(kl=0.1)
    batch = funcrl.collate(case.rollout, algorithm)
    with pytest.raises(ValueError, match="penalty.*ref_logprobs"):
        eager(algorithm, case.params, batch)
