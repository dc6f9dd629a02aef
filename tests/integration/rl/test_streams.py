"""The three streams of the loss: a policy gradient, cross-entropy, and a teacher, in any mix."""

from functools import partial

import pytest
import torch
from cases import equal, random_case, tiny_model
from torch.nn.functional import cross_entropy, kl_div

import funcrl

MODEL, TEACHER = tiny_model(), tiny_model(width=8, num_layers=1)
PARAMS = funcrl.init_params(MODEL, seed=0, dtype=torch.float64)
FIRST = funcrl.init_params(TEACHER, seed=1, dtype=torch.float64)
TEACHER_PARAMS = {name: 3 * leaf for name, leaf in FIRST.items()}  # of an opinion
GRPO, SFT, DISTILL = funcrl.grpo(), funcrl.sft(), funcrl.distill()


def rollout_of(seed, rows=6, length=7):
    case = random_case(seed, prompts=rows // 2, samples=2, length=length)
    generator = torch.Generator().manual_seed(seed)
    return case.rollout._replace(
        tokens=torch.randint(0, 11, (rows, length), generator=generator),
        rewards=torch.randn(rows, generator=generator, dtype=torch.float64),
    )


def taught(kind="reverse", **options):
    teacher = funcrl.Teacher(TEACHER, TEACHER_PARAMS, kind)
    return funcrl.logprob_fn(MODEL, teacher=teacher, **options)


def logits_of(model, params, batch):
    apply = funcrl.models.logits_fn(model)
    samples = [funcrl.Sample(*row) for row in zip(batch.tokens, batch.positions, strict=True)]
    return torch.stack([apply(params, sample) for sample in samples])


def literal(stream, batch, params, kind="reverse"):
    """A stream's loss, token by token, by torch's own functions."""
    logits, teacher = (
        logits_of(model, own, batch) for model, own in ((MODEL, params), (TEACHER, TEACHER_PARAMS))
    )
    loss = torch.zeros((), dtype=torch.float64)
    for i, t in batch.mask.nonzero().tolist():
        own, other = logits[i, t - 1].log_softmax(-1), teacher[i, t - 1].log_softmax(-1)
        token = batch.tokens[i, t]
        if stream == "policy":
            ratio = (own[token] - batch.behavior_logprobs[i, t]).exp()
            advantage = batch.advantages[i, t]
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            loss = loss - batch.token_weights[i, t] * surrogate
        elif stream == "cross_entropy":
            loss = loss + batch.ce_weights[i, t] * cross_entropy(logits[i, t - 1], token)
        elif kind == "forward":
            term = kl_div(own, other, log_target=True, reduction="sum")
            loss = loss + batch.teacher_weights[i, t] * term
        elif kind == "reverse":
            term = kl_div(other, own, log_target=True, reduction="sum")
            loss = loss + batch.teacher_weights[i, t] * term
        else:  # the estimate: its value is k1's, its gradient that of KL(pi, teacher)
            gap = (own[token] - batch.teacher_logprobs[i, t]).detach()
            weight = (own[token] - batch.behavior_logprobs[i, t]).exp().detach()
            moving = own[token] - own[token].detach()
            loss = loss + batch.teacher_weights[i, t] * weight * (gap + gap * moving)
    return loss


def gradient_of(losses, batch, kind="reverse"):
    params = {name: leaf.clone().requires_grad_() for name, leaf in PARAMS.items()}
    parts = {stream: literal(stream, batch, params, kind) for stream in losses}
    grads = torch.autograd.grad(sum(parts.values()), list(params.values()))
    return parts, dict(zip(params, grads, strict=True))


def stepped(model_fn, batch, **options):
    """Return what a step subtracted from the parameters, and its metrics."""
    step = funcrl.grpo_step(model_fn, optimizer=funcrl.optim.sgd(1.0), **options)
    new, metrics = step(step.init(PARAMS), batch)
    return {name: PARAMS[name] - new.params[name] for name in PARAMS}, metrics


def assert_equal_to(found, metrics, parts, grads):
    total = sum(part.item() for part in parts.values())
    assert abs(metrics.means["loss"].item() - total) <= 1e-12 * max(1, abs(total))
    for name in grads:
        assert (found[name] - grads[name]).abs().max() <= 1e-12, name
    for name, part in parts.items():
        assert abs(metrics.means[f"loss/{name}"] - part.item()) <= 1e-12


ROWS = {
    "padded": lambda batch: batch,
    "packed": partial(funcrl.packing.pack_batch, length=14),
    "prefixes": partial(funcrl.packing.pack_batch_groups, length=14),
}


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("microbatch", [1, 2, None])
def test_supervised_training_is_torch_cross_entropy(microbatch, layout):
    batch = funcrl.collate(rollout_of(1), SFT)
    parts, grads = gradient_of(["cross_entropy"], batch)
    count = int(batch.mask.sum())
    chosen = logits_of(MODEL, PARAMS, batch)[:, :-1][batch.mask[:, 1:]]
    mean = cross_entropy(chosen, batch.tokens[batch.mask])
    assert abs(parts["cross_entropy"].item() - mean.item()) <= 1e-12
    assert count > 5
    model_fn = funcrl.logprob_fn(MODEL, chunk=3)
    found, metrics = stepped(model_fn, ROWS[layout](batch), algorithm=SFT, microbatch=microbatch)
    assert_equal_to(found, metrics, parts, grads)
    names = {*metrics.means, *metrics.maxes}
    assert not [name for name in names if name.startswith(("sampling/", "clip_ratio/"))]


def test_supervised_training_reads_no_reward_and_no_behaviour():
    rollout = rollout_of(2)
    other = rollout._replace(
        rewards=-3 * rollout.rewards, behavior_logprobs=5 * rollout.behavior_logprobs
    )
    found = [
        stepped(funcrl.logprob_fn(MODEL), funcrl.collate(each, SFT), algorithm=SFT)[0]
        for each in (rollout, other)
    ]
    assert equal(*found)


@pytest.mark.parametrize("kind", ["reverse", "forward"])
@pytest.mark.parametrize(
    ("layout", "chunk", "microbatch"),
    [("padded", None, None), ("padded", 2, 2), ("padded", "all", 1),
     ("packed", 3, None), ("packed", None, 1), ("prefixes", 4, None)],
)  # fmt: skip
def test_a_teacher_of_the_whole_vocabulary_is_torch_kl_div(kind, layout, chunk, microbatch):
    batch = funcrl.collate(rollout_of(3), DISTILL)
    parts, grads = gradient_of(["teacher"], batch, kind)
    rows = ROWS[layout](batch)
    found, metrics = stepped(
        taught(kind, chunk=chunk), rows, algorithm=DISTILL, microbatch=microbatch
    )
    assert_equal_to(found, metrics, parts, grads)
    assert metrics.means["loss"] > 0.1
    assert "sampling/importance_sampling_ratio/mean" in metrics.means


@pytest.mark.parametrize("microbatch", [1, None])
def test_a_teacher_of_sampled_tokens_is_the_estimate(microbatch):
    rollout = rollout_of(4)
    rows = funcrl.Sample(rollout.tokens, torch.arange(7).expand(6, 7))
    scored = funcrl.score(funcrl.logprob_fn(TEACHER), TEACHER_PARAMS, rows).logprobs
    batch = funcrl.collate(rollout, DISTILL, teacher_logprobs=scored)
    parts, grads = gradient_of(["teacher"], batch, "estimate")
    found, metrics = stepped(
        funcrl.logprob_fn(MODEL), batch, algorithm=DISTILL, microbatch=microbatch
    )
    assert_equal_to(found, metrics, parts, grads)


def test_the_estimate_has_the_expected_gradient_of_the_divergence():
    """Over all tokens that the policy could draw, weighted by their probability."""
    logits = torch.randn(5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    teacher = torch.linspace(-1, 1, 5, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)

    def expected(logits):
        own = logits.log_softmax(0)
        rows = funcrl.Batch(
            tokens=torch.arange(5), positions=torch.arange(5), mask=torch.ones(5) > 0,
            behavior_logprobs=policy, advantages=policy, token_weights=(),
            teacher_weights=policy.exp(), teacher_logprobs=teacher,
        )  # fmt: skip
        return funcrl.policy_loss(DISTILL, funcrl.TokenScores(own, own), rows)[0]

    def divergence(logits):
        return kl_div(teacher, logits.log_softmax(0), log_target=True, reduction="sum")

    found, value = torch.func.grad_and_value(expected)(logits)
    wanted, whole = torch.func.grad_and_value(divergence)(logits)
    assert (found - wanted).abs().max() <= 1e-14
    assert abs(value - whole) <= 1e-14


@pytest.mark.parametrize("layout", ROWS)
@pytest.mark.parametrize("microbatch", [1, 3, None])
def test_streams_in_one_step_are_the_sum_of_their_losses(layout, microbatch):
    drawn = funcrl.collate(rollout_of(5), funcrl.grpo(teacher=0.5))
    shown = funcrl.collate(rollout_of(6, rows=4, length=9), SFT)
    batch = funcrl.batching.join([drawn, shown])
    assert batch.mask.shape == (10, 9)
    assert abs(batch.ce_weights.sum() - 1) < 1e-12
    assert abs(batch.token_weights.sum() - 1) < 1e-12
    assert abs(batch.teacher_weights.sum() - 0.5) < 1e-12
    parts, grads = gradient_of(["policy", "cross_entropy", "teacher"], batch)
    assert min(abs(part.item()) for part in parts.values()) > 1e-3
    rows = ROWS[layout](batch) if layout == "padded" else ROWS[layout](batch, length=18)
    found, metrics = stepped(
        taught(chunk=4), rows, algorithm=funcrl.grpo(teacher=0.5), microbatch=microbatch
    )
    assert_equal_to(found, metrics, parts, grads)


def test_a_mini_batch_has_the_weights_of_its_own_streams():
    mixed = funcrl.grpo(teacher=2.0)._replace(ce_weight=funcrl.aggregation.sequence_mean)
    drawn = funcrl.collate(rollout_of(7), funcrl.grpo(teacher=2.0))
    shown = funcrl.collate(rollout_of(8), SFT)
    batch = funcrl.batching.join([drawn, shown])
    for layout in ROWS.values():
        for part in funcrl.minibatches(layout(batch), mixed, 2, seed=1):
            was_drawn, was_shown = part.teacher_weights != 0, part.ce_weights != 0
            assert not (was_drawn & was_shown).any()
            assert torch.equal(was_drawn | was_shown, part.mask)
            assert torch.equal(was_drawn, part.token_weights != 0)
            for weights, total in (
                (part.token_weights, 1.0), (part.teacher_weights, 2.0), (part.ce_weights, 1.0)
            ):  # fmt: skip
                assert abs(weights.sum() - total * bool((weights != 0).any())) <= 1e-12


def test_a_compiled_step_has_the_bits_of_the_eager_one():
    batch = funcrl.batching.join(
        [
            funcrl.collate(rollout_of(5), funcrl.grpo(teacher=0.5)),
            funcrl.collate(rollout_of(6), SFT),
        ]
    )
    options = {
        "algorithm": funcrl.grpo(teacher=0.5), "microbatch": 4,
        "optimizer": funcrl.optim.adamw(1e-2),
    }  # fmt: skip
    eager = funcrl.grpo_step(taught(chunk=4), **options)
    state = eager.init(PARAMS)
    config = funcrl.CompileConfig(backend="eager", fuse="none")
    compiled = funcrl.compile_step(funcrl.donate(eager), state, batch, config)
    mine, theirs = funcrl.tree.map(torch.clone, state), state
    for _ in range(3):
        theirs, expected = eager(theirs, batch)
        mine, found = compiled(mine, batch)
        assert equal(found.means, expected.means)
        assert equal(mine, theirs)


def test_a_teacher_may_have_more_logits_than_tokens():
    """Those of larger models are padded to other sizes: what both have is compared."""
    wide = tiny_model(vocab_size=13, width=8, num_layers=1)
    params = funcrl.init_params(wide, seed=1, dtype=torch.float64)
    batch = funcrl.collate(rollout_of(3), DISTILL)
    cut = {
        name: leaf[:11] if name in ("embed.weight", "unembed.weight") else leaf
        for name, leaf in params.items()
    }
    same = tiny_model(width=8, num_layers=1)
    for chunk in (None, 2):
        found = [
            funcrl.score(
                funcrl.logprob_fn(MODEL, chunk=chunk, teacher=funcrl.Teacher(model, own)),
                PARAMS, batch,
            ).divergence
            for model, own in ((wide, params), (same, cut))
        ]  # fmt: skip
        assert (found[0] - found[1]).abs().max() <= 1e-14


def test_what_a_stream_lacks_is_named():
    rollout = rollout_of(3)
    batch = funcrl.collate(rollout, DISTILL)
    with pytest.raises(ValueError, match="teacher_logprobs in the batch, or a model_fn"):
        stepped(funcrl.logprob_fn(MODEL), batch, algorithm=DISTILL)
    nothing = batch._replace(teacher_weights=())
    with pytest.raises(ValueError, match="weights of at least one stream"):
        stepped(funcrl.logprob_fn(MODEL), nothing, algorithm=DISTILL)
    both = funcrl.batching.join([batch, funcrl.collate(rollout, SFT)])
    with pytest.raises(ValueError, match="minibatches expects an algorithm with a teacher_weight"):
        funcrl.minibatches(both, SFT, 2, seed=0)
    wrong = torch.full_like(rollout.behavior_logprobs, torch.nan)
    with pytest.raises(ValueError, match="collate expects finite teacher_logprobs"):
        funcrl.collate(rollout, DISTILL, teacher_logprobs=wrong)
    with pytest.raises(ValueError, match=r"batch\.ce_weights"):
        stepped(funcrl.logprob_fn(MODEL), batch._replace(ce_weights=torch.ones(3)))
    exact = tiny_model(numerics="exact")
    with pytest.raises(ValueError, match="native operations with teacher="):
        funcrl.logprob_fn(exact, teacher=funcrl.Teacher(TEACHER, TEACHER_PARAMS))
    with pytest.raises(ValueError, match="join expects at least one batch"):
        funcrl.batching.join([])
