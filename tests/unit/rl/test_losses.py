"""KL estimators as values and as losses, exactly, by summing over all outcomes."""

import pytest
import torch
from cases import random_case, table_model
from torch.func import grad, vmap

import funcrl
from funcrl import losses


def policy(seed: int, size: int = 5) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


LOGITS, REF = policy(0), policy(1).log_softmax(0)


def kl(logits):
    """KL(pi, ref)."""
    logprobs = logits.log_softmax(0)
    return (logprobs.exp() * (logprobs - REF)).sum()


def forward_kl(logits):
    """KL(ref, pi)."""
    return (REF.exp() * (REF - logits.log_softmax(0))).sum()


def expected_gradient(cost_fn, behavior_logits):
    """The exact expectation of the cost's gradient over a token of the behaviour policy."""
    behavior = behavior_logits.log_softmax(0)

    def cost(logits, token):
        logprob = logits.log_softmax(0).index_select(0, token)
        chosen = behavior.index_select(0, token), REF.index_select(0, token)
        return cost_fn(logprob, *chosen).sum()

    tokens = torch.arange(len(LOGITS))[:, None]
    grads = vmap(grad(cost), in_dims=(None, 0))(LOGITS, tokens)
    return (behavior.exp()[:, None] * grads).sum(0)


def expected_value(estimator):
    logprobs = LOGITS.log_softmax(0)
    return (logprobs.exp() * estimator(logprobs, REF)).sum()


def test_k1_and_k3_are_unbiased_values():
    assert (expected_value(losses.k1) - kl(LOGITS)).abs() < 1e-14
    assert (expected_value(losses.k3) - kl(LOGITS)).abs() < 1e-14
    assert (expected_value(losses.k2) - kl(LOGITS)).abs() > 1e-2


def test_k1_as_a_loss_has_no_gradient():
    gradient = expected_gradient(losses.as_loss(losses.k1), LOGITS)
    assert gradient.abs().max() < 1e-15


def test_k2_as_a_loss_has_the_gradient_of_kl():
    gradient = expected_gradient(losses.as_loss(losses.k2), LOGITS)
    assert (gradient - grad(kl)(LOGITS)).abs().max() < 1e-14


def test_k3_as_a_loss_has_the_gradient_of_the_other_direction():
    gradient = expected_gradient(losses.as_loss(losses.k3), LOGITS)
    assert (gradient - grad(forward_kl)(LOGITS)).abs().max() < 1e-14


@pytest.mark.parametrize("estimator", [losses.k1, losses.k2, losses.k3])
@pytest.mark.parametrize("behavior", [LOGITS, policy(2)], ids=["on-policy", "off-policy"])
def test_with_kl_gradient_is_right_for_each_and_for_any_sampler(estimator, behavior):
    gradient = expected_gradient(losses.with_kl_gradient(estimator), behavior)
    assert (gradient - grad(kl)(LOGITS)).abs().max() < 1e-14


def test_with_kl_gradient_keeps_the_value():
    logprobs = LOGITS.log_softmax(0)
    for estimator in (losses.k1, losses.k3):
        value = losses.with_kl_gradient(estimator)(logprobs, logprobs, REF)
        assert (value - estimator(logprobs, REF)).abs().max() < 1e-15


def test_k3_keeps_its_digits_near_zero():
    # k3(x) = x^2 / 2 - x^3 / 6 + ... with x = pi - ref; exp(-x) - 1 + x in float32 gives 0 or 6e-8.
    value = losses.k3(torch.tensor([1e-4]), torch.tensor([0.0])).item()
    assert value == pytest.approx(5e-9, rel=0.3)


def test_k3_does_not_overflow():
    gradient = grad(lambda x: losses.k3(x, torch.tensor([0.0])).sum())(torch.tensor([-200.0]))
    assert gradient.isfinite()
    assert losses.k3(torch.tensor([-200.0]), torch.tensor([0.0])).isfinite()


def test_a_custom_estimator_is_used_and_reported():
    def absolute(logprobs, ref_logprobs):
        return (logprobs - ref_logprobs).abs()

    fn = losses.penalty(kl=2.0, kl_estimator=absolute)
    scores = funcrl.TokenScores(torch.tensor([-1.0]), torch.tensor([0.0]))
    result = fn(scores, torch.tensor([-1.0]), torch.tensor([-4.0]))
    assert (result.cost.item(), result.kl.item()) == (6.0, 3.0)


def test_the_reference_is_reported_even_when_it_costs_nothing():
    scores = funcrl.TokenScores(torch.tensor([-1.0]), torch.tensor([0.0]))
    result = losses.penalty()(scores, torch.tensor([-1.0]), torch.tensor([-1.0]))
    assert result.cost.item() == 0.0
    assert result.kl.item() == 0.0


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="k1 expects ref_logprobs"):
        losses.k1(torch.zeros(3), torch.zeros(4))
    with pytest.raises(ValueError, match="k3 expects logprobs .*shape"):
        losses.k3(torch.zeros(2, 3), torch.zeros(2, 3))


def test_what_policy_loss_and_an_entropy_bonus_expect():
    scores = funcrl.TokenScores(torch.zeros(3), torch.zeros(3))
    sample = funcrl.Sample(torch.zeros(3, dtype=torch.int64), torch.arange(3))
    with pytest.raises(TypeError, match=r"policy_loss expects .* got Sample without mask"):
        funcrl.policy_loss(funcrl.grpo(), scores, sample)
    with pytest.raises(ValueError, match="grpo expects entropy to be a finite number, got inf"):
        funcrl.grpo(entropy=torch.inf)


@pytest.mark.parametrize(
    ("name", "options"),
    [("dapo", {}), ("cispo", {}), ("grpo", {}), ("dr_grpo", {"length": 7}), ("rloo", {})],
)
def test_the_entropy_bonus_has_the_weights_of_the_tokens(name, options):
    """As docs/algorithms.md has it beside TRL's, which is the mean over tokens for all of them."""
    case = random_case(3)
    mask = case.rollout.mask
    entropy, lengths = case.params["entropy"] * mask, mask.double().sum(dim=1)
    mean, mean_length = entropy.sum() / mask.sum(), lengths.sum() / (lengths > 0).sum()
    of_sequences = (entropy.sum(dim=1) / lengths)[lengths > 0].mean()
    expected = {
        "dapo": mean, "cispo": mean, "grpo": of_sequences,
        "dr_grpo": mean * mean_length / 7, "rloo": mean * mean_length,
    }[name]  # fmt: skip

    def loss(coefficient):
        algorithm = getattr(funcrl, name)(entropy=coefficient, **options)
        batch = funcrl.collate(case.rollout, algorithm)
        step = funcrl.grpo_step(table_model, algorithm=algorithm)
        return step(step.init(case.params), batch)[1].means["loss"]

    assert (loss(0.0) - loss(0.3)).item() == pytest.approx(0.3 * expected.item(), rel=1e-12)
