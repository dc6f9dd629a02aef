"""A step refuses packed rows for an algorithm that mixes the samples of a row."""

from itertools import cycle

import pytest
import torch
from cases import cell_model, equal, random_case

import funcrl
from funcrl import ratios
from funcrl.core.types import Penalty, Surrogate
from funcrl.rl.mixing import mixing_parts

ESTIMATORS = ["k1", "k2", "k3", "k1+", "k3+"]
CORRECTIONS = [
    None,
    ratios.truncated(2.0),
    ratios.truncated(2.0, level="sequence"),
    ratios.masked(3.0),
    ratios.masked(1.1, floor=0.9),
    ratios.masked(5.0, floor=0.5, level="token"),
]


def geometric_mean(logprobs, ratio, advantages):
    sampled = advantages != 0
    mean = torch.where(sampled, ratio.log(), 0.0).sum() / sampled.sum().clamp(min=1)
    return Surrogate(mean.exp() * advantages)


def summed(scores, behavior_logprobs, ref_logprobs):
    kl = scores.logprobs - ref_logprobs
    return Penalty(0.001 * kl.sum().expand_as(kl), kl)


def row_ratio(logprobs, behavior_logprobs, mask, segment_ids):
    return ratios.sequence(logprobs, behavior_logprobs, mask)


def row_weight(log_ratio, mask, segment_ids):
    return ratios.masked(3.0)(log_ratio, mask, ())


def forgetful(logprobs, ratio, advantages):
    """The right objective, with a gradient that is another one."""
    mean = ratio.mean()
    return Surrogate((mean - mean.detach() + ratio.detach()) * advantages)


def off_policy(logprobs, ratio, advantages, most=0.02):
    """Leaves a completion with a negative advantage out that is far from what it was drawn by."""
    sampled = advantages != 0
    kl = torch.where(sampled, -ratio.log(), 0.0).sum() / sampled.sum().clamp(min=1)
    return Surrogate(ratio * advantages * ~((kl.detach() > most) & (advantages < 0)))


def by_sign(logprobs, ratio, advantages):
    bounds = torch.where((advantages > 0).any(), 1.2, 4.0)
    return Surrogate(torch.minimum(ratio, bounds.to(ratio.dtype)) * advantages)


def by_largest(logprobs, ratio, advantages):
    return Surrogate(ratio * advantages / advantages.max().clamp(min=0.1))


def gated(scores, behavior_logprobs, ref_logprobs):
    kl = scores.logprobs - ref_logprobs
    return Penalty(kl * (kl.mean() > 0.7), kl)


def raised(logprobs, behavior_logprobs, mask, segment_ids):
    found = ratios.token(logprobs, behavior_logprobs, mask)
    return found._replace(ratio=found.ratio + 1000)


def above(logprobs, ratio, advantages):
    return Surrogate(ratio * torch.where(ratio.max() > 900, ratio.mean(), 1) * advantages)


def misreported(logprobs, ratio, advantages):
    """The right gradient, of a loss that is another one."""
    return Surrogate(ratio * advantages - advantages.mean())


MIXING = {
    "surrogate=geometric_mean": funcrl.grpo()._replace(surrogate=geometric_mean),
    "penalty=summed": funcrl.dapo()._replace(penalty=summed),
    "ratio=row_ratio": funcrl.gspo()._replace(ratio=row_ratio),
    "ratio=corrected(token, row_weight)": funcrl.grpo(correction=row_weight),
    "surrogate=forgetful": funcrl.grpo()._replace(surrogate=forgetful),
    "surrogate=misreported": funcrl.grpo()._replace(surrogate=misreported),
    "surrogate=off_policy": funcrl.grpo()._replace(surrogate=off_policy),
    "surrogate=by_sign": funcrl.grpo()._replace(surrogate=by_sign),
    "surrogate=by_largest": funcrl.grpo()._replace(surrogate=by_largest),
    "penalty=gated": funcrl.grpo()._replace(penalty=gated),
    "ratio=row_ratio, penalty=summed": funcrl.grpo()._replace(ratio=row_ratio, penalty=summed),
}


@pytest.mark.parametrize("name", ["grpo", "gspo", "cispo", "sapo", "rloo"])
def test_algorithms_with_a_name_keep_samples_apart(name):
    make = getattr(funcrl, name)
    for estimator, correction in zip(cycle(ESTIMATORS), CORRECTIONS, strict=False):
        options = {"kl": 0.04, "kl_estimator": estimator, "correction": correction}
        assert mixing_parts(make(entropy=0.01, **options)) == ""
    # With a correction the ratios are 1, so that the gradient alone tells.
    for correction in CORRECTIONS:
        mixed = make(correction=correction)._replace(surrogate=geometric_mean)
        assert mixing_parts(mixed) == "surrogate=geometric_mean"


def never(params, sample):
    raise AssertionError("the model must not be run")


def batches(algorithm):
    """Return parameters, a batch, and the same batch packed."""
    case = random_case()
    cells = torch.arange(case.rollout.mask.numel()).view_as(case.rollout.mask)
    rollout = case.rollout._replace(tokens=cells)
    batch = funcrl.collate(rollout, algorithm, case.ref_logprobs)
    return case.params, batch, funcrl.pack(rollout, algorithm, 20, case.ref_logprobs)


@pytest.mark.parametrize("parts", MIXING)
def test_a_mixing_algorithm_is_refused_on_packed_rows_alone(parts):
    algorithm = MIXING[parts]
    assert mixing_parts(algorithm) == parts
    params, batch, packed = batches(algorithm)
    step = funcrl.grpo_step(never, algorithm=algorithm)
    state = step.init(params)
    with pytest.raises(TypeError) as raised:
        step(state, packed)
    assert str(raised.value).startswith(
        f"grpo_step expects a Batch, one sample a row, for an algorithm whose {parts} depends on"
    )
    step = funcrl.grpo_step(cell_model, algorithm=algorithm)
    state, metrics = step(state, batch)
    assert metrics.maxes["grad_norm"] > 0
    assert state.step == 1


def test_a_traced_and_a_compiled_step_refuse_as_well():
    mixing, apart = MIXING["surrogate=geometric_mean"], funcrl.gspo(kl=0.1)
    params, batch, packed = batches(mixing)
    config = funcrl.CompileConfig(backend="eager", fuse="none")
    step = funcrl.grpo_step(cell_model, algorithm=mixing)
    state = step.init(params)
    for refuses in (
        lambda: funcrl.trace(step.update, state, packed),
        lambda: funcrl.compile_step(step, state, packed, config),
        lambda: funcrl.grpo_step(
            cell_model, algorithm=mixing, prepare=lambda scores, _: packed
        )(state, batch),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"^grpo_step.* surrogate=geometric_mean depends"):
            refuses()
    step = funcrl.grpo_step(cell_model, algorithm=apart)
    compiled = funcrl.compile_step(step, state, packed, config)
    assert equal(compiled(state, packed)[0], step(state, packed)[0])


def test_a_step_that_is_made_within_a_trace_is_not_asked():
    """Its tensors have no values there to compare."""
    params, batch, _ = batches(funcrl.grpo())
    step = funcrl.grpo_step(cell_model)
    state = step.init(params)
    graph = funcrl.trace(
        lambda state, batch: funcrl.grpo_step(cell_model)(state, batch), state, batch
    )
    assert equal(graph(state, batch), funcrl.trace(step.update, state, batch)(state, batch))


def test_functions_that_fit_their_own_rows_alone_are_not_known_to_mix():
    _, _, packed = batches(funcrl.grpo())
    places = torch.linspace(0.5, 1, packed.mask.shape[1], dtype=torch.float64)

    def faded(logprobs, ratio, advantages):
        return Surrogate(places * ratio * advantages)

    algorithm = funcrl.grpo()._replace(surrogate=faded)
    assert mixing_parts(algorithm) == ""
    params, _, packed = batches(algorithm)
    step = funcrl.grpo_step(cell_model, algorithm=algorithm)
    assert step(step.init(params), packed)[0].step == 1


def test_functions_that_round_keep_samples_apart():
    def low(logprobs, ratio, advantages):
        return Surrogate((ratio.bfloat16() * advantages.bfloat16()).to(ratio.dtype))

    def by_differences(logprobs, behavior_logprobs, mask, segment_ids):
        """The ratio of a completion by a difference of running sums, in single precision."""
        ids = mask.long() * 0 if isinstance(segment_ids, tuple) else segment_ids
        same = (ids == ids[:, None]).int()
        first, last = same.argmax(1), len(ids) - 1 - same.flip(1).argmax(1)
        kept = torch.where(mask, logprobs - behavior_logprobs, 0.0).float()
        total = kept.cumsum(0)
        ratio = (total[last] - total[first] + kept[first]).exp().to(logprobs.dtype)
        return funcrl.types.Ratio(ratio, torch.ones_like(ratio))

    assert mixing_parts(funcrl.grpo()._replace(surrogate=low)) == ""
    assert mixing_parts(funcrl.gspo()._replace(ratio=by_differences)) == ""


NOT_FINITE = {  # at ratios of some hundred, which no token that counts has
    "exp of single precision": lambda r: ((r - 1).float().exp() - 1).to(r.dtype),
    "square of half precision": lambda r: (r.half() ** 2).to(r.dtype),
    "a gradient of NaN": lambda r: torch.where(r < 2, (2 - r).sqrt(), 0.0),
}


@pytest.mark.parametrize("name", NOT_FINITE)
def test_functions_that_are_not_finite_far_away_keep_samples_apart(name):
    def surrogate(logprobs, ratio, advantages):
        return Surrogate(NOT_FINITE[name](ratio) * advantages)

    assert mixing_parts(funcrl.grpo()._replace(surrogate=surrogate)) == ""


def test_random_functions_are_not_known_to_mix_and_leave_the_generator_alone():
    def noisy(logprobs, ratio, advantages):
        return Surrogate(ratio * advantages * (torch.rand_like(ratio) > 0.5))

    before = torch.random.get_rng_state()
    assert mixing_parts(funcrl.grpo()._replace(surrogate=noisy)) == ""
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_step_that_is_made_in_inference_mode_is_asked():
    with torch.inference_mode():
        found = mixing_parts(funcrl.grpo()._replace(surrogate=geometric_mean))
    assert found == "surrogate=geometric_mean"


def test_parts_that_mix_only_together_are_both_named():
    algorithm = funcrl.grpo()._replace(ratio=raised, surrogate=above)
    assert mixing_parts(algorithm) == "ratio=raised, surrogate=above"
