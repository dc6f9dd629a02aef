"""A GRPO step with exact numerics: the same bits in micro-batches, compiled and packed."""

import functools
from dataclasses import replace

import pytest
import torch

import funcrl
from funcrl import CompileConfig
from funcrl.core.types import Sample
from funcrl.models import Transformer, TransformerConfig
from funcrl.ops import EXACT
from funcrl.rl.blocks import score_gradient

ROWS, T, V = 8, 13, 37


def network(num_layers=2, **options):
    return Transformer(
        TransformerConfig(
            vocab_size=V, width=32, num_layers=num_layers, num_heads=4, num_kv_heads=2,
            head_width=8, mlp_width=48, numerics="exact", **options,
        )
    )  # fmt: skip


def drawn_batch(model_fn, params):
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(V, (ROWS, T), generator=generator)
    mask = torch.ones(ROWS, T, dtype=torch.bool)
    mask[:, :3] = False
    positions = torch.arange(T).expand(ROWS, T)
    rollout = funcrl.Rollout(
        tokens=tokens,
        mask=mask,
        behavior_logprobs=funcrl.score(model_fn, params, Sample(tokens, positions)).logprobs,
        rewards=torch.rand(ROWS, generator=generator),
        group=torch.arange(ROWS) // 4,
        policy_version=torch.zeros(ROWS, dtype=torch.int64),
    )
    return rollout, funcrl.collate(rollout, funcrl.grpo(kl=0.0))


RATE = funcrl.optim.warmup(2, funcrl.optim.constant(1e-2))
ADAMW = funcrl.optim.chain(funcrl.optim.clip_by_global_norm(1.0), funcrl.optim.adamw(RATE))


def steps(
    model_fn, params, batch, count=3, compiled=None, donated=False, optimizer=ADAMW, **options
):
    """The parameters after some steps with a schedule, and the first step's metrics."""
    step = funcrl.grpo_step(model_fn, optimizer=optimizer, **options)
    step = funcrl.donate(step) if donated else step
    state = step.init(params)
    if compiled is not None:
        step = funcrl.compile_step(step, state, batch, compiled)
    reports = []
    for _ in range(count):
        state, report = step(state, batch)
        reports.append(report)
    return state.params, reports[0]


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
@pytest.mark.parametrize("shape", [{}, {"tied": False, "qkv_bias": True, "qk_norm": False}])
def test_micro_batches_end_with_the_same_parameters(shape, dtype):
    model = network(**shape)
    params = funcrl.init_params(model, seed=0)
    model_fn = funcrl.logprob_fn(model, dtype=dtype)
    _, batch = drawn_batch(model_fn, params)
    whole, report = steps(model_fn, params, batch)
    assert report.maxes["sampling/sampling_logp_difference/max"] == 0  # every ratio is 1
    for rows in (ROWS // 2, ROWS // 4):
        parts, _ = steps(model_fn, params, batch, microbatch=rows)
        assert same(whole, parts)
    assert not same(whole, params)


def test_native_micro_batches_differ():
    """What the test above would see if the order of additions were not fixed."""
    model = Transformer(replace(network().config, numerics="native"))
    params = funcrl.init_params(model, seed=0)
    model_fn = funcrl.logprob_fn(model)
    _, batch = drawn_batch(model_fn, params)
    assert not same(
        steps(model_fn, params, batch)[0], steps(model_fn, params, batch, microbatch=2)[0]
    )


def test_rows_in_any_order_once_they_are_sorted():
    model = network()
    params, model_fn = funcrl.init_params(model, seed=0), funcrl.logprob_fn(model)
    _, batch = drawn_batch(model_fn, params)
    numbers = torch.randperm(ROWS, generator=torch.Generator().manual_seed(1))
    shuffled = funcrl.tree.map(lambda leaf: leaf[numbers], batch)
    sorted_again = funcrl.batching.in_order(shuffled, numbers)
    whole, _ = steps(model_fn, params, batch)
    assert same(whole, steps(model_fn, params, sorted_again, microbatch=4)[0])
    with pytest.raises(ValueError, match=r"in_order expects numbers that all differ, got \[0, 0"):
        funcrl.batching.in_order(batch, torch.zeros_like(numbers))


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_has_the_bits_of_the_plain_one(backend):
    """Donated, with a schedule, in two micro-batches, with what it recomputes."""
    model = network()
    params, model_fn = funcrl.init_params(model, seed=0), funcrl.logprob_fn(model)
    _, batch = drawn_batch(model_fn, params)
    whole, _ = steps(model_fn, params, batch)
    compiled = CompileConfig(backend=backend, remat="selective")
    found, _ = steps(model_fn, params, batch, compiled=compiled, donated=True, microbatch=4)
    assert same(whole, found)


@pytest.mark.slow
def test_inductor_keeps_every_ratio_at_one():
    """It may fuse what is around the operations, which no log-probability passes through."""
    model = network(num_layers=1)
    params = funcrl.init_params(model, seed=0)
    model_fn = funcrl.logprob_fn(model, dtype=torch.bfloat16)
    _, batch = drawn_batch(model_fn, params)
    compiled = CompileConfig(backend="inductor")
    sgd = funcrl.optim.sgd(1e-2)  # of fewer kernels
    _, report = steps(model_fn, params, batch, count=1, compiled=compiled, optimizer=sgd)
    assert report.maxes["sampling/sampling_logp_difference/max"] == 0


def test_packed_rows_score_each_sample_as_alone():
    model = network()
    params, model_fn = funcrl.init_params(model, seed=0), funcrl.logprob_fn(model)
    rollout, batch = drawn_batch(model_fn, params)
    alone = funcrl.score(model_fn, params, batch).logprobs
    packed = funcrl.pack(rollout, funcrl.grpo(kl=0.0), 3 * T + 5)
    scores = funcrl.score(model_fn, params, packed).logprobs
    assert torch.equal(scores[packed.mask].sort().values, alone[batch.mask].sort().values)
    assert torch.equal(packed.behavior_logprobs[packed.mask], scores[packed.mask])


def test_packed_micro_batches_end_with_the_same_parameters():
    """Four packed rows at once, two at a time, one by one; and with the samples' gradient."""
    model = network()
    params, model_fn = funcrl.init_params(model, seed=0), funcrl.logprob_fn(model)
    rollout, batch = drawn_batch(model_fn, params)
    packed = funcrl.pack(rollout, funcrl.grpo(kl=0.0), 2 * T + 3)
    assert len(packed.tokens) == 4
    whole, report = steps(model_fn, params, packed)
    assert report.maxes["sampling/sampling_logp_difference/max"] == 0
    for rows in (2, 1):
        assert same(whole, steps(model_fn, params, packed, microbatch=rows)[0])
    loss = functools.partial(funcrl.policy_loss, funcrl.grpo(kl=0.0))
    found = score_gradient(model_fn, loss)(params, packed).grads
    for name, leaf in score_gradient(model_fn, loss)(params, batch).grads.items():
        bound = 64 * torch.finfo(leaf.dtype).eps * leaf.abs().amax().item()
        torch.testing.assert_close(found[name], leaf, rtol=0.0, atol=bound)


def test_parameters_of_two_dtypes_are_computed_in_that_of_the_embedding():
    model = network(num_layers=1)
    drawn = funcrl.init_params(model, seed=0)
    model_fn = funcrl.logprob_fn(model)
    for of_embedding, of_others in (
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
    ):
        params = {
            name: leaf.to(of_embedding if name == "embed.weight" else of_others)
            for name, leaf in drawn.items()
        }
        _, batch = drawn_batch(model_fn, params)
        by_sample = torch.vmap(model_fn, in_dims=(None, 0))(params, batch).logprobs
        assert torch.equal(funcrl.score(model_fn, params, batch).logprobs, by_sample)
        whole, report = steps(model_fn, params, batch)
        assert report.maxes["sampling/sampling_logp_difference/max"] == 0
        assert same(whole, steps(model_fn, params, batch, microbatch=ROWS // 2)[0])


def test_the_gradient_in_blocks_is_the_gradient():
    """Of all rows at once, to the rounding of float32; an odd number of rows is one block."""
    model = network(qkv_bias=True)
    params, model_fn = funcrl.init_params(model, seed=0), funcrl.logprob_fn(model)
    _, batch = drawn_batch(model_fn, params)
    batch = batch._replace(advantages=batch.advantages + 1.0)

    def sample_loss(params, sample):
        return score_loss(model_fn(params, sample), sample)

    def score_loss(scores, sample):
        loss, report = funcrl.policy_loss(funcrl.grpo(), scores, sample)
        return loss, report._replace(means={"entropy": scores.entropy.mean()})

    for rows, micro in ((8, None), (8, 3), (6, None), (7, 2), (1, None)):
        part = funcrl.tree.map(lambda leaf, rows=rows: leaf[:rows], batch)
        plain = funcrl.grads.summed_gradient(sample_loss)(params, part)
        found = score_gradient(model_fn, score_loss, microbatch=micro)(params, part)
        assert list(found.grads) == list(params)
        for name, leaf in plain.grads.items():
            bound = 64 * torch.finfo(leaf.dtype).eps * leaf.abs().amax().item()
            torch.testing.assert_close(found.grads[name], leaf, rtol=0.0, atol=bound)
        torch.testing.assert_close(found.loss, plain.loss)
        mean, expected = (each.metrics.means["entropy"] for each in (found, plain))
        torch.testing.assert_close(mean, expected, check_dtype=False)  # float64 in micro-batches
        for name, value in plain.metrics.maxes.items():
            assert torch.equal(found.metrics.maxes[name], value)


def test_bfloat16_parameters_are_summed_in_float32():
    """In micro-batches as at once: rounded once, after the last sum."""
    model = network()
    params = funcrl.init_params(model, seed=0, dtype=torch.bfloat16)
    model_fn = funcrl.logprob_fn(model)
    _, batch = drawn_batch(model_fn, params)
    whole, report = steps(model_fn, params, batch)
    assert report.maxes["sampling/sampling_logp_difference/max"] == 0
    for rows in (ROWS // 2, ROWS // 4):
        assert same(whole, steps(model_fn, params, batch, microbatch=rows)[0])


class OneSample(torch.nn.Module):
    """A network of one's own on exact operations: no batch axes, a buffer, and a layer twice."""

    def __init__(self):
        super().__init__()
        self.network = network(num_layers=1)
        self.alias, self.ops = self.network.blocks[0], self.network.ops
        self.gain = torch.nn.Parameter(torch.ones(32))
        self.register_buffer("scale", torch.full((32,), 1.5))

    def forward(self, tokens, positions, attend=None, head=None, dtype=None):
        assert tokens.ndim == 1

        def scaled_head(x, weight):
            return head(x * self.gain * self.scale.to(x.dtype), weight)

        return self.network(tokens, positions, attend, scaled_head, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_network_of_ones_own_is_scored_and_trained_alike(dtype):
    model = OneSample()
    params = funcrl.init_params(model, seed=0, dtype=dtype)
    model_fn = funcrl.logprob_fn(model)
    _, batch = drawn_batch(model_fn, params)
    _, report = steps(model_fn, params, batch)
    assert report.maxes["sampling/sampling_logp_difference/max"] == 0
    loss = functools.partial(funcrl.policy_loss, funcrl.grpo(kl=0.0))
    whole, *others = (
        score_gradient(model_fn, loss, microbatch=rows)(params, batch).grads
        for rows in (None, ROWS // 2, ROWS // 4)
    )
    for name, leaf in whole.items():
        if dtype == torch.float32 and name != "gain":  # a sum of torch's own
            assert all(torch.equal(leaf, other[name]) for other in others), name
    step = funcrl.grpo_step(funcrl.logprob_fn(model))
    funcrl.trace(step.update, step.init(params), batch)


class Looped(torch.nn.Module):
    """A layer that is called twice under two names."""

    def __init__(self):
        super().__init__()
        self.network = network(num_layers=1)
        self.network.blocks.append(self.network.blocks[0])
        self.ops = self.network.ops

    def forward(self, *inputs, head=None, dtype=None, **options):
        return self.network(*inputs, head=head, dtype=dtype, **options)


def test_a_module_that_stands_twice_has_one_gradient():
    model = Looped()
    params, model_fn = funcrl.init_params(model, seed=0), funcrl.logprob_fn(model)
    _, batch = drawn_batch(model_fn, params)
    loss = functools.partial(funcrl.policy_loss, funcrl.grpo(kl=0.0))

    def sample_loss(params, sample):
        return loss(model_fn(params, sample), sample)

    plain = funcrl.grads.summed_gradient(sample_loss)(params, batch).grads
    found = score_gradient(model_fn, loss)(params, batch).grads
    for name, leaf in plain.items():
        bound = 64 * torch.finfo(leaf.dtype).eps * leaf.abs().amax().item()
        torch.testing.assert_close(found[name], leaf, rtol=0.0, atol=bound)


def test_what_is_wrong_with_parameters_is_said():
    model = network(num_layers=1)
    params, model_fn = funcrl.init_params(model, seed=0), funcrl.logprob_fn(model)
    _, batch = drawn_batch(model_fn, params)
    missing = {name: leaf for name, leaf in params.items() if name != "embed.weight"}
    twice = params | {"unembed.weight": params["embed.weight"]}
    for wrong, words in (
        (missing, "all parameters of Transformer, got none for 'embed.weight'"),
        (twice, "tied parameters once, as 'embed.weight', got 'unembed.weight' too"),
    ):
        with pytest.raises(ValueError, match=words):
            steps(model_fn, wrong, batch)


@pytest.mark.parametrize("changed", ["add_rms_norm", "attend"])
def test_parts_that_sum_nothing_may_be_replaced(changed):
    """Two norms in the place of a fused one, and an attention for samples."""
    ops = EXACT._replace(add_rms_norm=None) if changed == "add_rms_norm" else EXACT
    model = Transformer(network().config, ops)
    params = funcrl.init_params(model, seed=0)
    attend = EXACT.attend_causal if changed == "attend" else None
    model_fn = funcrl.logprob_fn(model, attend=attend)
    _, batch = drawn_batch(model_fn, params)
    whole, _ = steps(model_fn, params, batch)
    for rows in (ROWS // 2, ROWS // 4):
        assert same(whole, steps(model_fn, params, batch, microbatch=rows)[0])


def test_a_function_that_wraps_another_is_called():
    model = network(num_layers=1)
    params, model_fn = funcrl.init_params(model, seed=0), funcrl.logprob_fn(model)
    _, batch = drawn_batch(model_fn, params)

    @functools.wraps(model_fn)
    def halved(params, sample):
        scores = model_fn(params, sample)
        return scores._replace(logprobs=scores.logprobs / 2)

    assert not same(steps(model_fn, params, batch)[0], steps(halved, params, batch)[0])
