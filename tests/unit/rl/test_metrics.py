"""Reports: each number is merged as its field says, whatever its name is."""

import pytest
import torch
from cases import equal, tiny_batch, tiny_model
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from funcrl import grads, metrics, tree

MODEL_FN = funcrl.logprob_fn(tiny_model())
PARAMS = funcrl.init_params(tiny_model(), seed=0, dtype=torch.float64)
BATCH = tiny_batch()


def report(value: float) -> funcrl.Metrics:
    """One of each field, under names that suggest another one."""
    x = torch.tensor(value)
    return funcrl.Metrics(
        sums={"x/max": x, "x_mean": x}, means={"num_x": x}, maxes={"x/mean": x}, last={"num_y": x}
    )


def test_each_field_is_its_own_reduction():
    merged = metrics.merge([report(2.0), report(6.0), report(1.0)], weights=[1, 2, 5])
    # (2 + 2 * 6 + 5 * 1) / 8 = 2.375; without weights (2 + 6 + 1) / 3 = 3.
    assert metrics.to_floats(merged) == {
        "x/max": 9.0, "x_mean": 9.0, "num_x": 2.375, "x/mean": 6.0, "num_y": 1.0,
    }  # fmt: skip
    assert metrics.merge([report(2.0), report(6.0), report(1.0)]).means["num_x"] == 3.0


def test_one_report_is_merged_to_itself():
    # 0.1 in float32 times 3, divided by 3, is another number in float32.
    merged = metrics.merge([report(0.1)], weights=[torch.tensor(3)])
    assert metrics.to_floats(merged) == metrics.to_floats(report(0.1))


def test_integers_stay_integers():
    counts = funcrl.Metrics({"num_tokens": torch.tensor(2**53 + 1)}, {}, {}, {})
    assert metrics.merge([counts, counts]).sums["num_tokens"].item() == 2**54 + 2


def test_a_mean_over_no_tokens_is_zero():
    merged = metrics.merge([report(2.0), report(6.0)], weights=[0, torch.tensor(0)])
    assert merged.means["num_x"] == 0.0


def test_a_maximum_that_is_not_a_number_is_not_hidden():
    merged = metrics.merge([report(torch.nan), report(6.0)])
    assert merged.maxes["x/mean"].isnan()


def test_merging_the_updates_of_a_rollout_gives_its_means_over_tokens():
    """Shares of a batch, trained on without moving: a loop in float64 is the oracle."""
    step = funcrl.grpo_step(MODEL_FN, optimizer=funcrl.optim.sgd(0.0))
    state = step.init(PARAMS)
    reports = [
        step(state, part)[1] for part in funcrl.minibatches(BATCH, funcrl.grpo(), count=4, seed=0)
    ]
    num_tokens = [each.sums["num_tokens"] for each in reports]
    assert len({int(count) for count in num_tokens}) > 1  # or any weights would do
    merged = metrics.merge(reports, weights=num_tokens)
    whole = step(state, BATCH)[1]
    assert equal(merged.sums, whole.sums)
    for name in ("entropy", "sampling/sampling_logp_difference/mean", "clip_ratio/region_mean"):
        total = sum(
            each.means[name].item() * int(count)
            for each, count in zip(reports, num_tokens, strict=True)
        )
        assert merged.means[name].item() == pytest.approx(total / int(sum(num_tokens)), abs=1e-14)
        assert merged.means[name].item() == pytest.approx(whole.means[name].item(), abs=1e-14)
    assert merged.maxes["grad_norm"] == max(each.maxes["grad_norm"] for each in reports)


@pytest.mark.slow
@pytest.mark.parametrize("per_sample", [None, lambda gradients: gradients])
def test_any_micro_batches_report_the_same(per_sample):
    """All four fields of a loss function, with a last micro-batch of fewer rows."""

    def loss_fn(params, sample):
        value = params["w"] * sample
        return value, funcrl.Metrics({"a": value}, {"b": value}, {"c": value}, {"d": value})

    params, rows = {"w": torch.tensor(2.0)}, torch.tensor([1.0, 7.0, 2.0, 4.0, 3.0])
    expected = {"a": 34.0, "b": 34.0 / 5, "c": 14.0, "d": 6.0}
    for size in (None, 1, 2, 3):
        gradient = grads.summed_gradient(loss_fn, per_sample, microbatch=size)
        for made in (gradient, make_fx(gradient)(params, rows)):
            assert metrics.to_floats(made(params, rows).metrics) == pytest.approx(expected)


def test_reports_that_cannot_be_merged_are_refused():
    with pytest.raises(ValueError, match="merge .*report"):
        metrics.merge([])
    with pytest.raises(ValueError, match="merge .* weight"):
        metrics.merge([report(1.0)], weights=[1, 2])
    with pytest.raises(ValueError, match="merge .*structure"):
        metrics.merge([report(1.0), report(1.0)._replace(means={})])
    with pytest.raises(TypeError, match="merge .*reports"):
        metrics.merge(report(1.0).sums)


def test_empty_fields_are_no_leaves():
    assert tree.leaves(funcrl.Metrics({}, {}, {}, {})) == []
    assert metrics.merge([funcrl.Metrics({}, {}, {}, {})] * 2) == funcrl.Metrics({}, {}, {}, {})


def test_a_report_of_no_token_does_not_count():
    merged = metrics.merge([report(float("nan")), report(2.0)], weights=[0, 3])
    assert merged.means["num_x"] == 2.0
    assert torch.isnan(merged.maxes["x/mean"])
    nothing = metrics.merge([report(1.0), report(2.0)], weights=[0, 0])
    assert nothing.means["num_x"] == 0.0


def test_weights_are_added_in_float64():
    counts = [torch.tensor(value) for value in (2.0**24, 1.0, 1.0)]
    merged = metrics.merge([report(1.0)] * 3, weights=counts)
    assert merged.means["num_x"] == 1.0


def test_a_name_in_two_fields_is_refused():
    x = torch.tensor(1.0)
    with pytest.raises(ValueError, match="to_floats .*'entropy'"):
        metrics.to_floats(funcrl.Metrics({"entropy": x}, {"entropy": x}, {}, {}))
