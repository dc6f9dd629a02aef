"""Per-sample and summed gradients, micro-batches, norms and the noise scale."""

import functools
import math

import pytest
import torch
from cases import equal, tiny_batch, tiny_model
from torch.func import grad, vmap

import funcrl
from benchmarks.measure import peak_bytes
from funcrl import grads, tree

MODEL = tiny_model()
MODEL_FN = funcrl.logprob_fn(MODEL)
PARAMS = funcrl.init_params(MODEL, seed=0, dtype=torch.float64)
BATCH = tiny_batch()


def loss_fn(params, sample):
    return funcrl.policy_loss(funcrl.grpo(), MODEL_FN(params, sample), sample)[0]


def aux_loss_fn(params, sample):
    return funcrl.policy_loss(funcrl.grpo(), MODEL_FN(params, sample), sample)


def largest_difference(a, b) -> float:
    return max(tree.leaves(tree.map(lambda x, y: (x - y).abs().max().item(), a, b)))


def batch_loss(params):
    return vmap(loss_fn, in_dims=(None, 0))(params, BATCH).sum()


def test_sum_and_mean_of_per_sample_gradients_are_those_of_the_batch():
    each = funcrl.per_sample_grad(loss_fn)(PARAMS, BATCH)
    whole = grad(batch_loss)(PARAMS)
    assert largest_difference(tree.map(lambda leaf: leaf.sum(0), each), whole) <= 1e-12
    mean = grad(lambda params: batch_loss(params) / 6)(PARAMS)
    assert largest_difference(tree.map(lambda leaf: leaf.mean(0), each), mean) <= 1e-12
    assert tree.global_norm(whole) > 1e-3


def test_per_sample_gradients_equal_a_loop_of_autograd():
    each = funcrl.per_sample_grad(loss_fn)(PARAMS, BATCH)
    for i in range(6):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
        sample = tree.map(lambda leaf, i=i: leaf[i], BATCH)
        loss_fn(leaves, sample).backward()
        own = {name: leaf.grad for name, leaf in leaves.items()}
        assert largest_difference(tree.map(lambda leaf, i=i: leaf[i], each), own) <= 1e-12


@pytest.mark.parametrize("chunk", [1, 2, 4, 6, 100])
def test_chunks_do_not_change_per_sample_gradients(chunk):
    whole = funcrl.per_sample_grad(loss_fn)(PARAMS, BATCH)
    parts = funcrl.per_sample_grad(loss_fn, chunk=chunk)(PARAMS, BATCH)
    assert largest_difference(whole, parts) <= 1e-14


RULES = {
    "token_mean": funcrl.aggregation.token_mean,
    "sequence_mean": funcrl.aggregation.sequence_mean,
    "constant": functools.partial(funcrl.aggregation.constant, length=5),
}


def weighted(rule):
    return BATCH._replace(token_weights=RULES[rule](BATCH.mask, dtype=torch.float64))


@pytest.mark.slow
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("microbatch", [1, 2, 3, 4, 5, 6, 7])
@pytest.mark.parametrize("per_sample", [None, funcrl.clip_per_sample(1e-2)])
def test_micro_batches_are_exact(microbatch, per_sample, rule):
    whole = grads.summed_gradient(aux_loss_fn, per_sample)(PARAMS, weighted(rule))
    parts = grads.summed_gradient(aux_loss_fn, per_sample, microbatch)(PARAMS, weighted(rule))
    assert largest_difference(whole, parts) <= 1e-12


@pytest.mark.parametrize("rule", RULES)
def test_any_order_of_rows_is_exact(rule):
    batch = weighted(rule)
    whole = grads.summed_gradient(aux_loss_fn)(PARAMS, batch)
    for order in ((5, 4, 3, 2, 1, 0), (2, 0, 4, 1, 5, 3), (3, 5, 1, 0, 2, 4)):
        shuffled = tree.map(lambda leaf, order=order: leaf[list(order)], batch)
        parts = grads.summed_gradient(aux_loss_fn, microbatch=2)(PARAMS, shuffled)
        assert largest_difference(whole, parts) <= 1e-12


@pytest.mark.slow
def test_only_one_micro_batch_is_alive():
    """Counted bytes: with one row at a time, 12 rows need no more memory than 6."""
    gradient = torch.no_grad()(grads.summed_gradient(aux_loss_fn, microbatch=1))
    large = tree.map(lambda leaf: leaf.repeat(2, *[1] * (leaf.ndim - 1)), BATCH)
    few, many = (peak_bytes(lambda b=b: gradient(PARAMS, b)) for b in (BATCH, large))
    whole = torch.no_grad()(grads.summed_gradient(aux_loss_fn))
    assert many <= few + 1024
    assert few < peak_bytes(lambda: whole(PARAMS, large)) / 2


def test_clipping_by_hand():
    # Norms 5 (3-4 across leaves) and 0: the first is halved to 2.5, the second stays 0, not NaN.
    got, metrics = funcrl.clip_per_sample(2.5)(
        {"a": torch.tensor([[3.0], [0.0]]), "b": torch.tensor([[[4.0]], [[0.0]]])}
    )
    assert metrics.means["per_sample/grad_norm/mean"] == 2.5
    assert metrics.means["per_sample/clipped_frac"] == 0.5
    assert metrics.maxes["per_sample/grad_norm/max"] == 5.0
    assert metrics.sums["per_sample/square_norms"] == 6.25
    assert torch.equal(got["a"], torch.tensor([[1.5], [0.0]]))
    assert torch.equal(got["b"], torch.tensor([[[2.0]], [[0.0]]]))


def test_clipped_gradients_equal_a_loop():
    each = funcrl.per_sample_grad(loss_fn)(PARAMS, BATCH)
    norms = funcrl.per_sample_norms(each)
    limit = norms[norms > 0].median().item()
    expected = tree.zeros_like(PARAMS)
    for i in range(6):
        own = tree.map(lambda leaf, i=i: leaf[i], each)
        norm = sum(leaf.square().sum() for leaf in own.values()) ** 0.5
        assert abs(norm - norms[i]) <= 1e-14
        factor = min(1.0, limit / norm.item()) if norm > 0 else 1.0
        expected = tree.add(expected, tree.scale(own, factor))
    got = grads.summed_gradient(aux_loss_fn, funcrl.clip_per_sample(limit))(PARAMS, BATCH).grads
    assert largest_difference(got, expected) <= 1e-14


@pytest.mark.parametrize("microbatch", [None, 2, 3])
def test_a_step_reports_norms_and_noise_of_its_samples(microbatch):
    """Means, shares and the noise scale are those of a loop over the samples, in float64."""
    each = funcrl.per_sample_grad(loss_fn)(PARAMS, BATCH)
    norms = [sum(leaf[i].square().sum() for leaf in each.values()) ** 0.5 for i in range(6)]
    limit = sorted(norm for norm in norms if norm > 0)[1].item()
    kept = [min(norm.item(), limit) for norm in norms]
    scaled = [min(1.0, limit / norm.item()) if norm > 0 else 1.0 for norm in norms]
    total = {
        name: sum(factor * leaf[i] for i, factor in enumerate(scaled))
        for name, leaf in each.items()
    }
    squares, of_sum = sum(k * k for k in kept), sum(leaf.square().sum() for leaf in total.values())
    noise, signal = (squares - of_sum / 6) / 5, (of_sum - squares) / 30
    step = funcrl.grpo_step(
        MODEL_FN, per_sample=funcrl.clip_per_sample(limit), microbatch=microbatch
    )
    _, metrics = step(step.init(PARAMS), BATCH)
    expected = {
        "per_sample/grad_norm/mean": sum(norms) / 6,
        "per_sample/clipped_frac": sum(norm > limit for norm in norms) / 6,
        "per_sample/noise": noise,
        "per_sample/signal": signal,
    }
    for name, value in expected.items():
        assert abs(metrics.means[name] - value) <= 1e-12 * abs(value), name
    assert abs(metrics.maxes["per_sample/grad_norm/max"] - max(norms)) <= 1e-14
    scale = noise / signal if signal > 0 else torch.inf
    assert metrics.last["per_sample/noise_scale"] == pytest.approx(float(scale), rel=1e-12)
    assert not [name for name in metrics.sums if name.startswith("per_sample")]


def test_the_noise_of_one_sample_is_not_known():
    """A mini-batch of one row has the metrics of others, with which they are merged."""
    step = funcrl.grpo_step(MODEL_FN, per_sample=funcrl.clip_per_sample(1.0))
    state = step.init(PARAMS)
    _, one = step(state, tree.map(lambda leaf: leaf[:1], BATCH))
    _, all_rows = step(state, BATCH)
    found = funcrl.metrics.to_floats(funcrl.metrics.merge([all_rows, one]))
    assert found.keys() == funcrl.metrics.to_floats(all_rows).keys()
    for name in ("noise", "signal", "noise_scale"):
        assert math.isnan(found[f"per_sample/{name}"])
    assert found["per_sample/grad_norm/mean"] > 0


def test_a_transform_of_ones_own_reports_metrics():
    def largest(gradients):
        top = torch.stack([leaf.abs().amax() for leaf in gradients.values()]).amax()
        return gradients, funcrl.Metrics(sums={}, means={}, maxes={"largest_entry": top}, last={})

    step = funcrl.grpo_step(MODEL_FN, per_sample=largest, microbatch=2)
    _, metrics = step(step.init(PARAMS), BATCH)
    with torch.no_grad():  # as in a step: a gradient to be differentiated is rounded otherwise
        each = funcrl.per_sample_grad(loss_fn, chunk=2)(PARAMS, BATCH)
    assert metrics.maxes["largest_entry"] == max(leaf.abs().max() for leaf in each.values())
    assert "per_sample/noise" not in metrics.means


def test_moments_are_those_of_stored_gradients():
    each = funcrl.per_sample_grad(loss_fn)(PARAMS, BATCH)
    for chunk in (None, 1, 4):
        moments = funcrl.gradient_moments(loss_fn, chunk=chunk)(PARAMS, BATCH)
        assert largest_difference(moments.sum, tree.map(lambda leaf: leaf.sum(0), each)) <= 1e-14
        expected = funcrl.per_sample_norms(each).square().sum()
        assert abs(moments.sum_square_norms - expected) <= 1e-14
        assert moments.num_samples == 6


def test_noise_scale_is_unbiased():
    """Over all equally likely pairs of four gradients, exactly: the estimates' mean is the truth.

    For pairs drawn with replacement E[noise] is the population's covariance trace and E[signal]
    the squared norm of its mean.
    """
    population = torch.randn(4, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    estimates = [
        funcrl.noise_scale(
            funcrl.GradientMoments({"w": a + b}, a.square().sum() + b.square().sum(), 2)
        )
        for a in population
        for b in population
    ]
    center = population.mean(0)
    trace = (population - center).square().sum(1).mean()
    assert abs(sum(e.noise for e in estimates) / 16 - trace) <= 1e-14
    assert abs(sum(e.signal for e in estimates) / 16 - center.square().sum()) <= 1e-14


def test_noise_scale_without_signal_is_infinite():
    opposite = funcrl.GradientMoments({"w": torch.zeros(1)}, torch.tensor(2.0), 2)
    assert funcrl.noise_scale(opposite).scale == torch.inf
    with pytest.raises(ValueError, match="noise_scale .* 1"):
        funcrl.noise_scale(opposite._replace(num_samples=1))


def test_refusals():
    with pytest.raises(ValueError, match="clip_per_sample .*max_norm"):
        funcrl.clip_per_sample(-1)
    with pytest.raises(ValueError, match="per_sample_grad .*chunk"):
        funcrl.per_sample_grad(loss_fn, chunk=0)
    with pytest.raises(ValueError, match="per_sample_grad .*empty"):
        funcrl.per_sample_grad(loss_fn)(PARAMS, tree.map(lambda leaf: leaf[:0], BATCH))
    uneven = BATCH._replace(mask=BATCH.mask[:3])
    with pytest.raises(ValueError, match="per_sample_grad .*'mask': 3"):
        funcrl.per_sample_grad(loss_fn)(PARAMS, uneven)
    dropped = grads.summed_gradient(aux_loss_fn, lambda g: {"embed.weight": g["embed.weight"]})
    with pytest.raises(ValueError, match="summed_gradient's per_sample .*structure"):
        dropped(PARAMS, BATCH)


@pytest.mark.parametrize(
    "reduced",
    [
        lambda leaf: leaf.sum(dim=0),
        lambda leaf: leaf.flatten(1).sum(dim=1),
        lambda leaf: leaf[..., None],
    ],
)
def test_per_sample_gradients_keep_their_axes(reduced):
    """What has been summed already would be summed again, and broadcast to the parameter."""

    def transform(gradients):
        return tree.map(reduced, gradients)

    with pytest.raises(ValueError, match=r"summed_gradient's per_sample .* '\w+.*'"):
        grads.summed_gradient(aux_loss_fn, transform)(PARAMS, BATCH)
    step = funcrl.grpo_step(MODEL_FN, per_sample=transform)
    with pytest.raises(ValueError, match="grpo_step's per_sample "):
        step(step.init(PARAMS), BATCH)


def test_one_row_for_all_samples_is_a_sum_of_theirs():
    """As noise is added to a sum of clipped gradients."""

    def summed(gradients):
        return tree.map(lambda leaf: leaf.sum(dim=0, keepdim=True), gradients)

    got = grads.summed_gradient(aux_loss_fn, summed)(PARAMS, BATCH)
    assert equal(got, grads.summed_gradient(aux_loss_fn, lambda g: g)(PARAMS, BATCH))


def test_a_loss_is_one_number():
    def two(params, sample):
        return params["embed.weight"].sum(dim=1)[:2]

    def two_and_metrics(params, sample):
        return two(params, sample), funcrl.Metrics({}, {}, {}, {})

    with pytest.raises(ValueError, match=r"per_sample_grad .*loss .* \[2\]"):
        funcrl.per_sample_grad(two)(PARAMS, BATCH)
    with pytest.raises(ValueError, match="gradient_moments .*loss"):
        funcrl.gradient_moments(two)(PARAMS, BATCH)
    for per_sample in (None, lambda g: g):
        with pytest.raises(ValueError, match="summed_gradient .*loss"):
            grads.summed_gradient(two_and_metrics, per_sample)(PARAMS, BATCH)


def test_gradients_of_gradients_are_not_cut():
    """Grad mode says whether the backward pass is recorded; under func.grad it is."""

    def cubic(params, x):
        return (params["w"] * x).sum() ** 3

    x = torch.tensor([[1.0, 2.0], [3.0, 1.0]], dtype=torch.float64)
    params = {"w": torch.tensor([1.0, -0.5], dtype=torch.float64)}

    def squared_norms(params):
        return funcrl.per_sample_norms(funcrl.per_sample_grad(cubic)(params, x)).square().sum()

    # |3 (w.x)^2 x|^2 = 9 (w.x)^4 |x|^2, whose gradient is 36 (w.x)^3 |x|^2 x.
    dots = x @ params["w"]
    expected = (36 * dots**3 * x.square().sum(1))[:, None] * x
    assert torch.allclose(grad(squared_norms)(params)["w"], expected.sum(0), atol=1e-12)


def test_gradients_are_those_of_torch_func():
    """To the bit, and without recording to the last one: silu's backward has two formulas."""
    whole = grad(batch_loss)(PARAMS)
    each = vmap(grad(loss_fn), in_dims=(None, 0))(PARAMS, BATCH)
    assert equal(grads.summed_gradient(aux_loss_fn)(PARAMS, BATCH).grads, whole)
    assert equal(funcrl.per_sample_grad(loss_fn)(PARAMS, BATCH), each)
    with torch.no_grad():
        lean = grads.summed_gradient(aux_loss_fn)(PARAMS, BATCH).grads
        lean_each = funcrl.per_sample_grad(loss_fn)(PARAMS, BATCH)
    assert largest_difference(lean, whole) <= 1e-16
    assert largest_difference(lean_each, each) <= 1e-16
