"""The step: state in, state out; metrics; bad batches; packing; tracing."""

import pytest
import torch
from cases import cell_model, equal, random_case, table_model, table_params, tiny_batch, tiny_model
from torch.fx.experimental.proxy_tensor import make_fx

import funcrl
from funcrl import optim, tree

MODEL = tiny_model()
MODEL_FN = funcrl.logprob_fn(MODEL)
PARAMS = funcrl.init_params(MODEL, seed=0, dtype=torch.float64)
BATCH = tiny_batch()


def close(a, b, tolerance) -> bool:
    pairs = zip(tree.leaves(a), tree.leaves(b), strict=True)
    return all((x.double() - y.double()).abs().max() <= tolerance for x, y in pairs)


def test_the_one_line_use():
    step = funcrl.grpo_step(MODEL_FN)
    state = step.init(PARAMS, seed=3)
    new, metrics = step(state, BATCH)
    assert isinstance(new, funcrl.TrainState)
    assert (state.step.item(), new.step.item(), new.seed.item()) == (0, 1, 3)
    assert step.init(PARAMS).seed == 0
    assert not equal(state.params, new.params)
    names = set(funcrl.metrics.to_floats(metrics))
    assert names == {
        "loss", "grad_norm", "learning_rate", "entropy", "num_tokens",
        "clip_ratio/low_mean", "clip_ratio/high_mean", "clip_ratio/region_mean",
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max",
        "sampling/importance_sampling_ratio/mean",
        "num_nonfinite_logprobs", "num_skipped_updates", "padding_frac",
    }  # fmt: skip
    assert equal(step.update(state, BATCH), (new, metrics))


def test_the_step_is_its_parts():
    optimizer = optim.chain(optim.clip_by_global_norm(0.01), optim.adamw(0.1))
    step = funcrl.grpo_step(MODEL_FN, algorithm=funcrl.dapo(), optimizer=optimizer)
    new, metrics = step(step.init(PARAMS), BATCH)

    leaves = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    loss = 0
    for i in range(6):
        sample = tree.map(lambda leaf, i=i: leaf[i], BATCH)
        loss = loss + funcrl.policy_loss(funcrl.dapo(), MODEL_FN(leaves, sample), sample)[0]
    loss.backward()
    torch_optimizer = torch.optim.AdamW(leaves.values(), lr=0.1)
    norm = torch.nn.utils.clip_grad_norm_(leaves.values(), 1e9)
    for leaf in leaves.values():
        leaf.grad.mul_(min(1.0, 0.01 / norm.item()))
    torch_optimizer.step()
    assert abs(metrics.means["loss"] - loss.detach()) <= 1e-12
    assert abs(metrics.maxes["grad_norm"] - norm) <= 1e-12
    assert metrics.last["learning_rate"] == 0.1
    # A gradient entry near eps = 1e-8 turns an error of 1e-17 into 1e-9 of the step of 0.1.
    assert close(new.params, {name: leaf.detach() for name, leaf in leaves.items()}, 1e-9)


def test_metrics_by_hand():
    # Three tokens: pi/behaviour = 1.5, 1 and 0.5, with advantages 1, 1 and -1.
    mask = torch.tensor([[False, True, True], [False, True, False]])
    ratio = torch.tensor([[9.0, 1.5, 1.0], [9.0, 0.5, 9.0]], dtype=torch.float64)
    behavior = torch.full((2, 3), -2.0, dtype=torch.float64)
    batch = funcrl.Batch(
        tokens=torch.tensor([[0, 0, 0], [1, 1, 1]]),
        positions=torch.arange(3).expand(2, 3),
        mask=mask,
        behavior_logprobs=behavior,
        advantages=torch.tensor([[0.0, 1.0, 1.0], [0.0, -1.0, 0.0]], dtype=torch.float64),
        token_weights=funcrl.aggregation.token_mean(mask, torch.float64),
        ref_logprobs=behavior,
    )
    entropy = torch.tensor([[9.0, 1.0, 2.0], [9.0, 6.0, 9.0]], dtype=torch.float64)
    params = {"logprobs": behavior + ratio.log(), "entropy": entropy}
    step = funcrl.grpo_step(table_model)
    metrics = step(step.init(params), batch)[1]
    log = ratio.log()
    means = {
        "loss": -(1.2 + 1.0 - 0.8) / 3,
        "entropy": 3.0,
        "clip_ratio/low_mean": 1 / 3,
        "clip_ratio/high_mean": 1 / 3,
        "clip_ratio/region_mean": 2 / 3,
        "sampling/sampling_logp_difference/mean": ((log[0, 1] - log[1, 1]) / 3).item(),
        "sampling/importance_sampling_ratio/mean": 1.0,
        "kl": ((1 / 1.5 - 1 + log[0, 1] + 2 - 1 + log[1, 1]) / 3).item(),
        "padding_frac": 1 / 6,  # the second row's last token
    }
    assert {name: value.item() for name, value in metrics.means.items()} == pytest.approx(means)
    assert metrics.sums == {"num_tokens": 3, "num_nonfinite_logprobs": 0}
    largest = metrics.maxes["sampling/sampling_logp_difference/max"].item()
    assert largest == pytest.approx(0.6931471805599453)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"microbatch": 1},
        {"microbatch": 4},
        {"per_sample": lambda grads: grads},
        {"per_sample": lambda grads: grads, "microbatch": 2},
        {"per_sample": funcrl.clip_per_sample(1e6)},
    ],
)
def test_how_the_gradient_is_made_does_not_matter(options):
    # SGD, because AdamW divides a gradient by its own size and blows rounding up.
    plain = funcrl.grpo_step(MODEL_FN, optimizer=optim.sgd(1.0))
    other = funcrl.grpo_step(MODEL_FN, optimizer=optim.sgd(1.0), **options)
    expected, metrics = plain(plain.init(PARAMS), BATCH)
    got, other_metrics = other(other.init(PARAMS), BATCH)
    assert close(got, expected, 1e-12)
    shared = funcrl.Metrics(*(
        {name: value for name, value in field.items() if not name.startswith("per_sample/")}
        for field in other_metrics
    ))  # fmt: skip
    assert close(shared, metrics, 1e-12)


@pytest.mark.slow
def test_no_per_sample_gradient_is_made_without_per_sample():
    """The traced graph has no tensor of B times the largest parameter, and with it one has."""

    def largest(step):
        graph = make_fx(step.update)(step.init(PARAMS), BATCH)
        sizes = [n.meta["val"].numel() for n in graph.graph.nodes if _is_tensor(n.meta.get("val"))]
        return max(sizes)

    def _is_tensor(value):
        return isinstance(value, torch.Tensor)

    per_sample = 6 * max(leaf.numel() for leaf in PARAMS.values())
    sgd = optim.sgd(1.0)
    identity = funcrl.grpo_step(MODEL_FN, optimizer=sgd, per_sample=lambda g: g)
    assert largest(identity) >= per_sample
    assert largest(funcrl.grpo_step(MODEL_FN, optimizer=sgd)) < per_sample


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"per_sample": funcrl.clip_per_sample(0.1)}, {"prepare": funcrl.top_entropy(0.3)}],
)
def test_the_whole_step_is_one_graph(options):
    model = tiny_model(num_layers=1)
    step = funcrl.grpo_step(funcrl.logprob_fn(model), microbatch=3, **options)
    state = step.init(funcrl.init_params(model, seed=0, dtype=torch.float64))
    graph = make_fx(step.update)(state, BATCH)
    assert equal(graph(state, BATCH), step.update(state, BATCH))
    later, _ = step(state, BATCH)
    other = tiny_batch(seed=9)
    assert equal(graph(later, other), step.update(later, other))


def test_an_all_masked_batch_gives_zero():
    nothing = torch.zeros_like(BATCH.mask)
    weights = funcrl.aggregation.sequence_mean(nothing, torch.float64)
    batch = BATCH._replace(mask=nothing, token_weights=weights)
    step = funcrl.grpo_step(MODEL_FN, optimizer=optim.sgd(1.0))
    new, metrics = step(step.init(PARAMS), batch)
    assert metrics.means["loss"] == 0
    assert metrics.maxes["grad_norm"] == 0
    assert metrics.sums["num_tokens"] == 0
    assert equal(new.params, PARAMS)
    assert all(torch.isfinite(value) for value in tree.leaves(metrics))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "sapo", "rloo"])
def test_nonfinite_behavior_logprobs_leave_numerator_and_denominator(name, bad):
    """As if the token had not been sampled, whatever the algorithm."""
    algorithm = getattr(funcrl, name)()
    case = random_case(2)
    row, t = [int(x) for x in case.rollout.mask.nonzero()[0]]
    holed = case.rollout.behavior_logprobs.clone()
    holed[row, t] = bad
    mask = case.rollout.mask.clone()
    mask[row, t] = False
    step = funcrl.grpo_step(table_model, algorithm=algorithm, optimizer=optim.sgd(1.0))
    state = step.init(case.params)
    with_hole = funcrl.collate(case.rollout._replace(behavior_logprobs=holed), algorithm)
    without = funcrl.collate(case.rollout._replace(mask=mask), algorithm)
    got, metrics = step(state, with_hole)
    expected, _ = step(state, without)
    assert equal(got, expected)
    assert metrics.sums["num_nonfinite_logprobs"] == 1
    assert metrics.sums["num_tokens"] == mask.sum()
    rollout_metrics = funcrl.metrics.describe_rollout(
        case.rollout._replace(behavior_logprobs=holed)
    )
    assert rollout_metrics["num_nonfinite_logprobs"] == 1


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "sapo"])
@pytest.mark.parametrize("options", [{}, {"kl": 0.1, "kl_estimator": "k3+"}])
def test_a_very_unlikely_token_does_not_stop_training(name, options):
    """Finite, but e^9998 overflows: the ratio is held at e^20."""
    algorithm = getattr(funcrl, name)(**options)
    case = random_case(2, dtype=torch.float32)
    row, t = [int(x) for x in case.rollout.mask.nonzero()[0]]
    behavior = case.rollout.behavior_logprobs.clone()
    behavior[row, t] = -9999.0
    rollout = case.rollout._replace(behavior_logprobs=behavior)
    step = funcrl.grpo_step(table_model, algorithm=algorithm, optimizer=optim.sgd(1.0))
    state = step.init(case.params)
    _, metrics = step(state, funcrl.collate(rollout, algorithm, case.ref_logprobs))
    assert metrics.last["num_skipped_updates"] == 0
    assert all(torch.isfinite(value) for value in tree.leaves(metrics))
    assert metrics.maxes["sampling/sampling_logp_difference/max"] > 9000


def test_numbers_are_kept_in_at_least_float32():
    # 70 x 1,000 tokens: their number overflows float16, and a weight of 1/70,000 vanishes in it.
    rollout = funcrl.Rollout(
        tokens=torch.zeros(70, 1001, dtype=torch.int64),
        mask=(torch.arange(1001) > 0).expand(70, 1001),
        behavior_logprobs=torch.zeros(70, 1001, dtype=torch.float16),
        rewards=torch.arange(70) % 2 == 0,  # bools are rewards too
        group=torch.zeros(70, dtype=torch.int64),
        policy_version=torch.zeros(70, dtype=torch.int64),
    )
    batch = funcrl.collate(rollout, funcrl.dapo())
    assert batch.token_weights.dtype == batch.advantages.dtype == torch.float32
    assert batch.token_weights.sum().item() == pytest.approx(1.0, abs=1e-5)


@pytest.mark.slow
def test_bf16_gradients_are_accumulated_in_float32():
    rows = 256
    batch = funcrl.tree.map(lambda leaf: leaf[:1].expand(rows, *leaf.shape[1:]), BATCH)
    batch = batch._replace(token_weights=batch.token_weights / rows)
    params = tree.cast(PARAMS, torch.bfloat16)
    options = {"algorithm": funcrl.grpo(clip=(1.0, 99.0)), "optimizer": optim.sgd(1.0)}
    norms = []
    for microbatch in (None, 1):
        step = funcrl.grpo_step(MODEL_FN, microbatch=microbatch, **options)
        norms.append(step(step.init(params), batch)[1].maxes["grad_norm"].item())
    # 256 equal gradients: rounding each sum to 8 bits would stop growing at half of them.
    assert norms[1] == pytest.approx(norms[0], rel=0.02)


@pytest.mark.parametrize("first", [0, torch.tensor(0)], ids=["int", "tensor"])
def test_a_python_number_in_an_optimizers_state_is_named(first):
    """Whether `init` puts it there or the first update does."""

    def update(grads, state, params):
        return tree.scale(grads, -0.1), {"n": {"updates": 1}}

    optimizer = funcrl.GradientTransformation(lambda params: {"n": {"updates": first}}, update)
    step = funcrl.grpo_step(MODEL_FN, optimizer=optimizer)
    with pytest.raises(TypeError, match=r"state.* 'n\.updates'"):
        step(step.init(PARAMS), BATCH)


def test_any_optimizer_will_do():
    """One without a learning rate: the metric is left out."""
    step = funcrl.grpo_step(MODEL_FN, optimizer=optim.stateless(lambda g, p: tree.scale(g, -1.0)))
    _, metrics = step(step.init(PARAMS), BATCH)
    assert "learning_rate" not in metrics.last


def test_junk_outside_the_mask_is_never_seen():
    case = random_case(2)
    batch = funcrl.collate(case.rollout, funcrl.grpo(), case.ref_logprobs)
    penalized = funcrl.grpo(kl=0.1, entropy=0.1)
    step = funcrl.grpo_step(table_model, algorithm=penalized, optimizer=optim.sgd(1.0))
    expected = step(step.init(case.params), batch)
    outside = ~batch.mask
    junk = batch._replace(
        advantages=batch.advantages.masked_fill(outside, torch.nan),
        token_weights=batch.token_weights.masked_fill(outside, torch.nan),
        ref_logprobs=batch.ref_logprobs.masked_fill(outside, torch.nan),
    )
    junk_params = {name: leaf.masked_fill(outside, torch.nan) for name, leaf in case.params.items()}
    got = step(step.init(junk_params), junk)
    assert equal(got[1], expected[1])
    kept = funcrl.tree.map(lambda leaf: leaf[batch.mask], got[0].params)
    assert equal(kept, funcrl.tree.map(lambda leaf: leaf[batch.mask], expected[0].params))


def test_a_nonfinite_gradient_skips_the_update_and_counts():
    step = funcrl.grpo_step(MODEL_FN, optimizer=optim.adamw(0.1))
    state, _ = step(step.init(PARAMS), BATCH)
    poisoned, metrics = step(state, BATCH._replace(advantages=BATCH.advantages * torch.nan))
    assert metrics.last["num_skipped_updates"] == 1
    assert equal(poisoned.params, state.params)
    assert equal(poisoned.opt_state.inner, state.opt_state.inner)
    after, metrics = step(poisoned, BATCH)
    expected, _ = step(state, BATCH)
    assert equal(after.params, expected.params)
    assert metrics.last["num_skipped_updates"] == 1


def test_parameters_of_a_module_do_not_tie_steps_together():
    step = funcrl.grpo_step(table_model)
    leaves = {k: torch.nn.Parameter(v) for k, v in table_params(BATCH).items()}
    batch = BATCH._replace(tokens=torch.arange(6)[:, None].expand(6, 7).contiguous())
    state, metrics = step(step.init(leaves), batch)
    assert not any(leaf.requires_grad for leaf in tree.leaves((state, metrics)))


@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "rloo"])
def test_packing_does_not_change_the_loss(name):
    """A table that a packed row reads by its own indices: the same tokens, laid end to end."""
    algorithm = getattr(funcrl, name)(correction=funcrl.ratios.masked(2.0, level="sequence"))
    case = random_case(4)
    rows, length = case.rollout.mask.shape
    cells = torch.arange(rows * length).reshape(rows, length)
    rollout = case.rollout._replace(tokens=cells)

    step = funcrl.grpo_step(cell_model, algorithm=algorithm, optimizer=optim.sgd(1.0))
    state = step.init(case.params)
    expected, metrics = step(state, funcrl.collate(rollout, algorithm))
    packed = funcrl.pack(rollout, algorithm, length=17)
    assert packed.tokens.shape[0] < rows
    got, packed_metrics = step(state, packed)
    assert close(got, expected, 1e-14)
    packed_share, share = (m.means.pop("padding_frac") for m in (packed_metrics, metrics))
    assert packed_share < share
    assert close(packed_metrics, metrics, 1e-14)
    with pytest.raises(TypeError, match="grpo_step.*per_sample.* PackedBatch"):
        funcrl.grpo_step(cell_model, per_sample=lambda g: g)(state, packed)


CORRECTION = funcrl.ratios.masked(1.5, floor=0.5, level="sequence")


def holed_case():
    """A rollout with one generator value missing, and junk for the policy outside the mask."""
    case = random_case(5)
    row, t = [int(x) for x in case.rollout.mask.nonzero()[2]]
    behavior = case.rollout.behavior_logprobs.clone()
    behavior[row, t] = torch.nan
    outside = ~case.rollout.mask
    params = {name: leaf.masked_fill(outside, -50.0) for name, leaf in case.params.items()}
    return case._replace(rollout=case.rollout._replace(behavior_logprobs=behavior), params=params)


def test_recentering_gives_the_first_step_of_a_correction():
    case = holed_case()
    corrected = funcrl.grpo(correction=CORRECTION)
    inside = funcrl.grpo_step(table_model, algorithm=corrected, optimizer=optim.sgd(1.0))
    before = funcrl.grpo_step(
        table_model, optimizer=optim.sgd(1.0), prepare=funcrl.recenter(CORRECTION)
    )
    batch = funcrl.collate(case.rollout, corrected)
    expected, _ = inside(inside.init(case.params), batch)
    got, metrics = before(before.init(case.params), batch)
    assert close(got, expected, 1e-14)
    assert not equal(got.params, case.params)
    assert metrics.sums["num_nonfinite_logprobs"] == 1
    assert metrics.means["sampling/importance_sampling_ratio/mean"] == 1


def test_recentering_a_packed_batch_goes_by_segments():
    case = holed_case()
    rows, length = case.rollout.mask.shape
    rollout = case.rollout._replace(tokens=torch.arange(rows * length).reshape(rows, length))
    step = funcrl.grpo_step(
        cell_model, optimizer=optim.sgd(1.0), prepare=funcrl.recenter(CORRECTION)
    )
    state = step.init(case.params)
    expected, _ = step(state, funcrl.collate(rollout, funcrl.grpo()))
    got, _ = step(state, funcrl.pack(rollout, funcrl.grpo(), length=17))
    assert close(got, expected, 1e-14)


def test_top_entropy_leaves_the_penalty_alone():
    """Only the policy gradient of the other tokens goes; weights and KL stay."""
    case = random_case(6)
    algorithm = funcrl.grpo(kl=0.1)
    batch = funcrl.collate(case.rollout, algorithm, case.ref_logprobs)
    scores = funcrl.TokenScores(case.params["logprobs"], case.params["entropy"])
    prepared = funcrl.top_entropy(0.3)(scores, batch)
    assert torch.equal(prepared.token_weights, batch.token_weights)
    assert 0 < (prepared.advantages != 0).sum() < (batch.advantages != 0).sum()
    step = funcrl.grpo_step(table_model, algorithm=algorithm, prepare=funcrl.top_entropy(0.0))
    _, metrics = step(step.init(case.params), batch)
    kl = funcrl.losses.k3(case.params["logprobs"][batch.mask], case.ref_logprobs[batch.mask])
    expected = 0.1 * (kl * batch.token_weights[batch.mask]).sum()
    assert abs(metrics.means["loss"] - expected) <= 1e-14


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("prepare", [None, funcrl.recenter(funcrl.ratios.truncated(3.0))])
def test_a_batch_that_collate_did_not_make(bad, prepare):
    """Its weights are its maker's affair, but the token is left out, and it is counted."""
    case = random_case(3)
    batch = funcrl.collate(case.rollout, funcrl.grpo())
    row, t = [int(x) for x in batch.mask.nonzero()[0]]
    behavior, mask = batch.behavior_logprobs.clone(), batch.mask.clone()
    behavior[row, t], mask[row, t] = bad, False
    step = funcrl.grpo_step(table_model, optimizer=optim.sgd(1.0), prepare=prepare)
    state = step.init(case.params)
    got, metrics = step(state, batch._replace(behavior_logprobs=behavior))
    expected, other = step(state, batch._replace(mask=mask))
    assert equal(got, expected)
    assert metrics.sums["num_nonfinite_logprobs"] == 1
    counted = other.sums | {"num_nonfinite_logprobs": torch.tensor(1)}
    assert equal(metrics, other._replace(sums=counted))


def test_a_bandit_is_a_policy_of_one_token():
    """No prompt and no network: four arms, of which the third pays; any function is a policy."""

    def bandit(params, sample):
        log_softmax = params["arms"].log_softmax(-1)
        entropy = funcrl.ops.entropy(log_softmax)
        return funcrl.TokenScores(log_softmax[sample.tokens], entropy.expand(sample.tokens.shape))

    algorithm = funcrl.grpo()
    step = funcrl.grpo_step(bandit, algorithm=algorithm, optimizer=optim.adamw(0.1))
    state = step.init({"arms": torch.zeros(4)})
    for index in range(60):
        logprobs = state.params["arms"].log_softmax(-1)
        generator = funcrl.rng.generator(0, index)
        arm = torch.multinomial(logprobs.exp(), 16, replacement=True, generator=generator)
        rollout = funcrl.Rollout(
            tokens=arm[:, None],
            mask=torch.ones(16, 1, dtype=torch.bool),
            behavior_logprobs=logprobs[arm][:, None],
            rewards=arm == 2,
            group=torch.zeros(16, dtype=torch.int64),
            policy_version=torch.full((16,), index),
        )
        state, _ = step(state, funcrl.collate(rollout, algorithm))
    assert state.params["arms"].softmax(-1)[2] > 0.9


def test_the_state_is_a_copy():
    module = torch.nn.Linear(2, 2)
    state = funcrl.grpo_step(table_model).init(dict(module.named_parameters()))
    before = tree.map(torch.clone, state)
    with torch.no_grad():
        module.weight.zero_()
    assert equal(state, before)


def test_bad_arguments_are_refused_at_once():
    with pytest.raises(TypeError, match="grpo_step .*model_fn.* Linear"):
        funcrl.grpo_step(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="grpo_step .*algorithm.* dapo"):
        funcrl.grpo_step(MODEL_FN, algorithm=funcrl.dapo)
    with pytest.raises(TypeError, match="grpo_step .*optimizer.* AdamW"):
        funcrl.grpo_step(MODEL_FN, optimizer=torch.optim.AdamW)
    with pytest.raises(TypeError, match="grpo_step .*per_sample"):
        funcrl.grpo_step(MODEL_FN, per_sample=1.0)
    with pytest.raises(TypeError, match="grpo_step .*prepare"):
        funcrl.grpo_step(MODEL_FN, prepare=0.2)
    step = funcrl.grpo_step(lambda params, sample: params["norm.weight"])
    with pytest.raises(TypeError, match="grpo_step .*model_fn.* Tensor"):
        step(step.init(PARAMS), BATCH)


def test_bad_batches_are_refused_by_name():
    step = funcrl.grpo_step(MODEL_FN)
    state = step.init(PARAMS)
    with pytest.raises(ValueError, match=r"grpo_step .* \[0, 7\]"):
        step(state, tree.map(lambda leaf: leaf[:0], BATCH))
    with pytest.raises(ValueError, match="grpo_step .*batch.mask.* shape"):
        step(state, BATCH._replace(mask=BATCH.mask[:, :3]))
    with pytest.raises(ValueError, match="grpo_step .*batch.tokens.* shape"):
        step(state, tree.map(lambda leaf: leaf[0], BATCH))
    with pytest.raises(TypeError, match="grpo_step .*batch.mask.* torch.bool"):
        step(state, BATCH._replace(mask=BATCH.mask.long()))
    with pytest.raises(TypeError, match="grpo_step's update .*batch"):
        step(state, BATCH._asdict())
    with pytest.raises(TypeError, match="grpo_step's update .*batch.advantages"):
        step(state, BATCH._replace(advantages=()))
    with pytest.raises(ValueError, match="grpo_step's init .*{}"):
        step.init({})
    with pytest.raises(TypeError, match="grpo_step's init .*'w'"):
        step.init({"w": torch.zeros(2, device="meta")})
    with pytest.raises(ValueError, match="functional .*'norm.weight'"):
        step(step.init({k: v for k, v in PARAMS.items() if k != "norm.weight"}), BATCH)
    with pytest.raises(ValueError, match="grpo_step .*microbatch"):
        funcrl.grpo_step(MODEL_FN, microbatch=0)


def model_of(reshape):
    def model_fn(params, sample):
        return funcrl.TokenScores(*(reshape(scores) for scores in table_model(params, sample)[:2]))

    return model_fn


@pytest.mark.parametrize("reshape", [lambda x: x[:, None], lambda x: x[1:], lambda x: x.sum()])
def test_a_model_that_scores_no_token_each_is_refused_by_name(reshape):
    case = random_case()
    batch, model_fn = funcrl.collate(case.rollout, funcrl.grpo()), model_of(reshape)
    step = funcrl.grpo_step(model_fn)
    with pytest.raises(ValueError, match="policy_loss .*scores.logprobs.* shape"):
        step(step.init(case.params), batch)
    with pytest.raises(ValueError, match=r"score .*model_fn\(...\).logprobs.* shape"):
        funcrl.score(model_fn, case.params, batch)


@pytest.mark.parametrize(
    ("part", "field", "wrong"),
    [
        ("ratio", "ratio", lambda x: x.mean()),
        ("ratio", "correction", lambda x: x[:1]),
        ("surrogate", "objective", lambda x: x[:, None]),
        ("surrogate", "clipped_low", lambda x: x.any()),
        ("surrogate", "clipped_high", lambda x: x[:1]),
        ("penalty", "cost", lambda x: x.sum()),
        ("penalty", "kl", lambda x: x.sum()),
    ],
)
def test_parts_of_an_algorithm_return_a_number_for_each_token(part, field, wrong):
    case, right = random_case(), funcrl.grpo(kl=0.1)

    def changed(*args):
        result = getattr(right, part)(*args)
        return result._replace(**{field: wrong(getattr(result, field))})

    algorithm = right._replace(**{part: changed})
    batch = funcrl.collate(case.rollout, algorithm, case.ref_logprobs)
    step = funcrl.grpo_step(table_model, algorithm=algorithm)
    with pytest.raises(ValueError, match=rf"policy_loss .*algorithm.{part}\(...\).{field} .*shape"):
        step(step.init(case.params), batch)
    bare = right._replace(
        **{part: lambda *args: wrong(args[0].logprobs if part == "penalty" else args[0])}
    )
    step = funcrl.grpo_step(table_model, algorithm=bare)
    with pytest.raises(TypeError, match=rf"policy_loss .*algorithm.{part}\(...\) "):
        step(step.init(case.params), batch)


@pytest.mark.parametrize("name", ["advantages", "token_weights", "behavior_logprobs", "positions"])
@pytest.mark.parametrize("wrong", [lambda x: x[:, :1], lambda x: x[:, 0], lambda x: x[:1]])
def test_what_prepare_returns_is_a_batch(name, wrong):
    def prepare(scores, batch):
        return batch._replace(**{name: wrong(getattr(batch, name))})

    step = funcrl.grpo_step(MODEL_FN, prepare=prepare)
    with pytest.raises(ValueError, match=rf"grpo_step\(prepare=...\) .*batch.{name} "):
        step(step.init(PARAMS), BATCH)


@pytest.mark.parametrize("wrong", [torch.sum, lambda leaf: leaf[:1], lambda leaf: leaf[..., None]])
def test_an_optimizers_updates_have_the_shapes_of_the_parameters(wrong):
    tx = optim.stateless(lambda grads, params: tree.map(wrong, grads))
    step = funcrl.grpo_step(MODEL_FN, optimizer=tx)
    with pytest.raises(ValueError, match=r"grpo_step .*updates .* '\w+\."):
        step(step.init(PARAMS), BATCH)


def test_corrections_return_a_number_for_each_token():
    """One for a whole row would be broadcast, over the wrong axis where a batch is square."""

    def of_row(log_ratio, mask, segment_ids):
        return log_ratio.sum().exp()

    square = tiny_batch(rows=6, length=6)
    scores = funcrl.TokenScores(torch.zeros(6, 6).double(), torch.zeros(6, 6).double())
    with pytest.raises(ValueError, match=r"recenter .*correction\(...\)"):
        funcrl.recenter(of_row)(scores, square)
    row = torch.zeros(6)
    with pytest.raises(ValueError, match=r"corrected .*correction\(...\)"):
        funcrl.ratios.corrected(funcrl.ratios.token, of_row)(row, row, row == 0, ())


def test_bad_rollouts_are_refused_by_name():
    rollout = random_case().rollout
    with pytest.raises(ValueError, match="collate .*rewards.* nan .* row 0"):
        funcrl.collate(rollout._replace(rewards=rollout.rewards * torch.nan), funcrl.grpo())
    holed = torch.where(rollout.mask, torch.nan, 0.0)
    with pytest.raises(ValueError, match="collate .*ref_logprobs.* nan .* row 0"):
        funcrl.collate(rollout, funcrl.grpo(), holed)
    with pytest.raises(ValueError, match=r"collate .*rollout.tokens.* \[0, "):
        funcrl.collate(funcrl.Rollout(*(field[:0] for field in rollout)), funcrl.grpo())
    with pytest.raises(ValueError, match="collate .*rollout.rewards"):
        funcrl.collate(rollout._replace(rewards=rollout.rewards[:3]), funcrl.grpo())
    skewed = funcrl.grpo(weight=lambda mask, dtype: torch.ones((), dtype=dtype))
    with pytest.raises(ValueError, match=r"collate .*algorithm.weight\(...\)"):
        funcrl.collate(rollout, skewed)
    with pytest.raises(TypeError, match="collate .*rollout.tokens"):
        funcrl.collate(rollout._replace(tokens=rollout.tokens.float()), funcrl.grpo())
    with pytest.raises(TypeError, match="pack .*length"):
        funcrl.pack(rollout, funcrl.grpo(), length=12.0)
    with pytest.raises(ValueError, match=r"pack .* 3 .* row \d"):
        funcrl.pack(rollout, funcrl.grpo(), length=3)
    with pytest.raises(ValueError, match="collate .*rollout.policy_version"):
        funcrl.collate(rollout._replace(policy_version=torch.zeros(1).long()), funcrl.grpo())
    with pytest.raises(ValueError, match="collate .*ref_logprobs.* shape"):
        funcrl.collate(rollout, funcrl.grpo(), torch.zeros(2, 2))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_a_rollout_without_any_behavior_logprob_is_refused(bad):
    """It would be trained on as nothing, and weight decay alone would move the parameters."""
    rollout = random_case().rollout
    none = rollout._replace(behavior_logprobs=torch.full_like(rollout.behavior_logprobs, bad))
    for make in (funcrl.collate, lambda *args: funcrl.pack(*args, length=20)):
        with pytest.raises(
            ValueError, match=r"collate .*behavior_logprobs.*Samples\.policy_logprobs"
        ):
            make(none, funcrl.grpo())
    # Nothing was sampled, or all of it is masked: there is nothing that could be finite.
    nothing = none._replace(mask=torch.zeros_like(rollout.mask))
    assert not funcrl.collate(nothing, funcrl.grpo()).token_weights.any()
    one = none.behavior_logprobs.clone()
    one[tuple(rollout.mask.nonzero()[0])] = -1.0
    batch = funcrl.collate(rollout._replace(behavior_logprobs=one), funcrl.grpo())
    assert batch.mask.sum() == 1


def test_groups_that_teach_nothing_are_counted_and_dropped():
    rollout = random_case(0).rollout
    rewards = rollout.rewards.clone()
    rewards[:4] = 0.3
    rewards[4:] = torch.arange(8) / 8
    rollout = rollout._replace(rewards=rewards)
    numbers = funcrl.metrics.describe_rollout(rollout)
    assert numbers["frac_reward_zero_std"] == pytest.approx(1 / 3)
    kept = funcrl.drop_zero_variance(rollout)
    assert kept.tokens.shape[0] == 8
    assert funcrl.metrics.describe_rollout(kept)["frac_reward_zero_std"] == 0
    empty = funcrl.drop_zero_variance(rollout._replace(rewards=rewards * 0))
    with pytest.raises(ValueError, match=r"collate .*rollout.tokens.* \[0, "):
        funcrl.collate(empty, funcrl.grpo())


def test_rollout_metrics_by_hand():
    rollout = funcrl.Rollout(
        tokens=torch.ones(4, 4, dtype=torch.int64),
        mask=torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 1, 1, 0], [0, 0, 0, 0]]).bool(),
        behavior_logprobs=torch.zeros(4, 4),
        rewards=torch.tensor([0.0, 2.0, 1.0, 1.0]),
        group=torch.tensor([0, 0, 1, 1]),
        policy_version=torch.zeros(4, dtype=torch.int64),
    )
    named = {"right": torch.tensor([0.0, 1.0, 1.0, 1.0])}
    truncated = torch.tensor([True, False, False, False])
    numbers = funcrl.metrics.describe_rollout(rollout, named, truncated)
    # Deviations of the groups: sqrt(2) and 0. Of (0, 1, 1, 1): sqrt(0.75 / 3) = 0.5.
    assert numbers == pytest.approx(
        {
            "reward": 1.0,
            "reward_std": 2**0.5 / 2,
            "frac_reward_zero_std": 0.5,
            "completions/mean_length": 1.5,
            "completions/min_length": 0.0,
            "completions/max_length": 3.0,
            "completions/clipped_ratio": 0.25,
            "completions/mean_terminated_length": 1.0,
            "completions/min_terminated_length": 0.0,
            "completions/max_terminated_length": 2.0,
            "rewards/right/mean": 0.75,
            "rewards/right/std": 0.5,
            "num_nonfinite_logprobs": 0,
        }
    )
    none_ended = funcrl.metrics.describe_rollout(rollout, named, torch.ones(4, dtype=torch.bool))
    assert not any("terminated" in name for name in none_ended)


def test_deviations_of_interleaved_groups_of_several_sizes():
    rewards, group = torch.tensor([0.0, 2.0, 1.0, 5.0, 5.0, 7.0]), torch.tensor([3, 1, 3, 1, 1, 2])
    rollout = random_case(3).rollout._replace(rewards=rewards, group=group)
    rollout = tree.map(lambda leaf: leaf[:6], rollout)
    numbers = funcrl.metrics.describe_rollout(rollout)
    # Of (2, 5, 5): sqrt(3); of 7 alone: 0; of (0, 1): sqrt(1/2).
    assert numbers["reward_std"] == pytest.approx((3**0.5 + 0.5**0.5) / 3)
    assert numbers["frac_reward_zero_std"] == pytest.approx(1 / 3)


def test_truncated_completions_are_not_counted_as_sequences():
    rollout = random_case(3).rollout
    truncated = torch.zeros(12, dtype=torch.bool)
    truncated[:6] = True
    batch = funcrl.collate(funcrl.mask_truncated(rollout, truncated), funcrl.grpo())
    assert not batch.mask[:6].any()
    assert batch.token_weights.sum().item() == pytest.approx(1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"per_sample": funcrl.clip_per_sample(0.1)}])
def test_on_a_gpu(options):
    step = funcrl.grpo_step(MODEL_FN, optimizer=optim.sgd(1.0), microbatch=4, **options)
    # At position 0 the rotary embedding is the identity; elsewhere its float32 cosines differ in
    # the last bit between the devices, and the float64 comparison would see nothing else.
    batch = BATCH._replace(positions=torch.zeros_like(BATCH.positions))
    expected = step(step.init(PARAMS), batch)
    on_device = [tree.map(lambda leaf: leaf.cuda(), values) for values in (PARAMS, batch)]
    got = step(step.init(on_device[0]), on_device[1])
    assert all(leaf.is_cuda for leaf in tree.leaves(got))
    assert close(tree.map(torch.Tensor.cpu, got), expected, 1e-12)
    graph = make_fx(step.update)(step.init(on_device[0]), on_device[1])
    assert equal(graph(step.init(on_device[0]), on_device[1]), got)
