"""Layer patterns and the network's options: against a literal oracle, and packed against alone."""

import pytest
import torch
from cases import equal, relative, tiny_batch, twice
from hybrids import KINDS, OPTIONS, hybrid, literal_logits, spread_params
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, vmap

import funcrl
from funcrl import CompileConfig, PackedBatch, ops
from funcrl.generators.embedded.captured import captured_runs, is_captured
from funcrl.models import Transformer, TransformerConfig, recur_causal, recur_segments

TOKENS = torch.tensor([1, 5, 2, 9, 10, 3, 3])
SAMPLE = funcrl.types.Sample(TOKENS, torch.arange(len(TOKENS)))


@pytest.mark.parametrize("numerics", ["native", "exact"])
@pytest.mark.parametrize("name", OPTIONS)
def test_logits_and_gradients_are_the_oracles(name, numerics):
    """In float64, where both are right to 1e-12; rotary angles are the same float32."""
    model = hybrid(name, numerics=numerics)
    params = spread_params(model)
    apply = funcrl.functional(model)
    weights = torch.randn(len(TOKENS), 11, generator=funcrl.rng.generator(1), dtype=torch.float64)

    def loss(params, logits_of):
        return (logits_of(params) * weights).sum()

    def ours(params):
        return apply(params, TOKENS, SAMPLE.positions)

    def oracle(params):
        return literal_logits(model.config, params, TOKENS)

    torch.testing.assert_close(ours(params), oracle(params), rtol=1e-11, atol=1e-12)
    found, expected = (grad(loss)(params, logits_of) for logits_of in (ours, oracle))
    assert relative(found, expected) < 1e-10
    batched = vmap(lambda tokens: apply(params, tokens, SAMPLE.positions))(TOKENS[None])
    torch.testing.assert_close(batched[0], ours(params), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("chunk", [None, 2, "all"])
@pytest.mark.parametrize("numerics", ["native", "exact"])
@pytest.mark.parametrize("name", ["cap", "all"])
def test_scores_in_chunks_have_the_cap(name, numerics, chunk):
    model = hybrid(name, numerics=numerics)
    params = spread_params(model)
    model_fn = funcrl.logprob_fn(model, temperature=0.7, chunk=chunk)

    def ours(params):
        scores = model_fn(params, SAMPLE)
        return scores.logprobs.sum() + 0.3 * scores.entropy[1:].square().sum()

    def oracle(params):
        logits = literal_logits(model.config, params, TOKENS)
        scores = funcrl.token_scores(logits, TOKENS, temperature=0.7)
        return scores.logprobs.sum() + 0.3 * scores.entropy[1:].square().sum()

    torch.testing.assert_close(ours(params), oracle(params), rtol=1e-11, atol=1e-12)
    assert relative(grad(ours)(params), grad(oracle)(params)) < 1e-10


def packed_row(lengths, padding, seed=0):
    """A row of samples end to end, of tokens below 11, and the places of each."""
    draws = funcrl.rng.generator(seed)
    length = sum(lengths) + padding
    tokens = torch.randint(0, 11, (length,), generator=draws)
    positions, segments = torch.zeros(2, length, dtype=torch.int64)
    segments[:] = -1
    places, start = [], 0
    for segment, size in enumerate(lengths):
        places.append(slice(start, start + size))
        positions[places[-1]] = torch.arange(size)
        segments[places[-1]] = segment
        start += size
    zeros = torch.zeros(length)
    row = PackedBatch(tokens, positions, segments >= 0, zeros, zeros, zeros, segment_ids=segments)
    return row, places


LENGTHS = (5, 1, 9, 2, 70)


@pytest.mark.parametrize("name", KINDS)
def test_packed_samples_have_the_bits_that_they_have_alone(name):
    model = hybrid(name, numerics="exact")
    params = spread_params(model, torch.float32)
    model_fn = funcrl.logprob_fn(model)
    row, places = packed_row(LENGTHS, padding=3)
    packed = model_fn(params, row)
    for place in places:
        alone = funcrl.types.Sample(row.tokens[place], row.positions[place])
        scores = model_fn(params, alone)
        # A segment's first token has the score of the token before it, and no weight.
        for whole, part in zip(packed[:2], scores[:2], strict=True):
            assert torch.equal(whole[place][1:], part[1:])


@pytest.mark.parametrize("numerics", ["native", "exact"])
@pytest.mark.parametrize("name", KINDS)
def test_one_changed_sample_moves_nothing_else(name, numerics):
    model = hybrid(name, numerics=numerics)
    params = spread_params(model, torch.float32)
    model_fn = funcrl.logprob_fn(model)
    row, places = packed_row(LENGTHS, padding=3)
    before = model_fn(params, row)
    for changed, place in enumerate(places):
        tokens = row.tokens.clone()
        tokens[place] = (tokens[place] + 1) % 11
        after = model_fn(params, row._replace(tokens=tokens))
        for other, part in enumerate(places):
            own = slice(part.start + 1, part.stop)  # the first token's score is of what is before
            for old, new in zip(before[:2], after[:2], strict=True):
                same = torch.equal(old[own], new[own])
                assert same == (other != changed) or part.stop - part.start == 1


@pytest.mark.parametrize("name", ["sliding", "delta and full", "all"])
def test_native_packed_samples_are_near_those_alone(name):
    """In float64, where the rounding of other shapes is below 1e-12; gradients, too."""
    model = hybrid(name)
    params = spread_params(model)
    model_fn = funcrl.logprob_fn(model)
    row, places = packed_row(LENGTHS, padding=3)
    weights = torch.randn(len(row.tokens), generator=funcrl.rng.generator(2)).double()

    def packed_loss(params):
        scores = model_fn(params, row).logprobs
        return sum((scores * weights)[place][1:].sum() for place in places)

    def alone_loss(params):
        total = 0
        for place in places:
            alone = funcrl.types.Sample(row.tokens[place], row.positions[place])
            total = total + (model_fn(params, alone).logprobs * weights[place])[1:].sum()
        return total

    torch.testing.assert_close(packed_loss(params), alone_loss(params), rtol=1e-12, atol=1e-12)
    assert relative(grad(packed_loss)(params), grad(alone_loss)(params)) < 1e-10


def test_windows_reach_into_shared_prefixes():
    """A sample behind a shared prompt sees the prompt's last tokens, as alone."""
    for numerics in ("native", "exact"):
        model = hybrid("sliding", numerics=numerics)
        params = spread_params(model)
        attend = model.ops.attend_segments(
            torch.tensor([0, 0, 0, 1, 1, 2, 2]), torch.tensor([-1, -1, -1, 0, 0, 0, 0])
        )
        positions = torch.tensor([0, 1, 2, 3, 4, 3, 4])
        apply = funcrl.functional(model)
        packed = apply(params, TOKENS, positions, attend=attend)
        for own in ([3, 4], [5, 6]):
            alone = apply(params, TOKENS[[0, 1, 2, *own]], torch.arange(5))
            torch.testing.assert_close(packed[own], alone[3:], rtol=1e-12, atol=1e-12)


def test_flash_attention_has_windows():
    model = hybrid("sliding")
    params = spread_params(model)
    flash = funcrl.logprob_fn(
        model, attend=ops.attend_flash, attend_segments=ops.attend_flash_segments
    )
    plain = funcrl.logprob_fn(model)
    row, _ = packed_row((5, 1, 9), padding=2)
    for sample in (SAMPLE, row):
        losses = [
            lambda params, fn=fn: fn(params, sample).logprobs.sum()  # noqa: B023 (called at once)
            for fn in (flash, plain)
        ]
        torch.testing.assert_close(losses[0](params), losses[1](params), rtol=1e-12, atol=1e-12)
        assert relative(*(grad(loss)(params) for loss in losses)) < 1e-10


def test_flash_attention_stands_beside_delta_layers():
    model = hybrid("delta and full")
    params = spread_params(model)
    flash = funcrl.logprob_fn(model, attend=ops.attend_flash)
    found = flash(params, SAMPLE).logprobs
    expected = funcrl.logprob_fn(model)(params, SAMPLE).logprobs
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def rows_of(pack):
    """Rows for a step: one sample each, or packed."""
    batch = tiny_batch()
    if pack is None:
        return batch
    case = tiny_rollout()
    return pack(case, funcrl.grpo(), 21)


def tiny_rollout():
    batch = tiny_batch()
    return funcrl.Rollout(
        tokens=batch.tokens,
        mask=batch.mask,
        behavior_logprobs=batch.behavior_logprobs,
        rewards=torch.tensor([0.1, 0.9, 0.3, 0.4, 1.0, 0.0], dtype=torch.float64),
        group=torch.tensor([0, 0, 1, 1, 2, 2]),
        policy_version=torch.zeros(6, dtype=torch.int64),
    )


def by_loop(*inputs):
    """The definition of the gated delta scan, one token after the other."""
    return ops.gated_delta_scan(*inputs, backend="loop")


@pytest.mark.parametrize(
    ("pack", "microbatch"), [pytest.param(None, 2, marks=pytest.mark.slow), (funcrl.pack, None)]
)
def test_a_compiled_step_is_the_loops(pack, microbatch):
    """Several steps with a hybrid network, microbatched, packed, per sample and compiled."""
    model = hybrid("all", num_layers=2)
    loop = Transformer(model.config, ops.NATIVE._replace(gated_delta=by_loop))
    params = spread_params(model)
    rows = rows_of(pack)
    per_sample = funcrl.clip_per_sample(0.5) if pack is None else None
    results = []
    for network, fast in ((loop, False), (model, True)):
        step = funcrl.grpo_step(
            funcrl.logprob_fn(network),
            optimizer=funcrl.optim.adamw(1e-2),
            microbatch=microbatch if fast else None,
            per_sample=per_sample,
        )
        state = step.init(params)
        run = step
        if fast:
            run = funcrl.compile_step(step, state, rows, CompileConfig(backend="eager"))
        results.append(twice(run, state, rows))
    for (state, metrics), (other, other_metrics) in zip(*results, strict=True):
        assert relative(other.params, state.params) < 1e-12
        assert relative(other_metrics.sums, metrics.sums) < 1e-10


def test_initial_parameters_are_neutral_and_as_mamba_draws_them():
    model = hybrid("all", delta_heads=64, delta_key_heads=64)
    params = funcrl.init_params(model, seed=0)
    assert equal(params, funcrl.init_params(model, seed=0))
    assert not params["blocks.0.mlp_norm.weight"].any()  # the offset is 1
    assert torch.equal(params["blocks.0.delta.norm.weight"], torch.ones(4))  # it has none
    rates = params["blocks.0.delta.log_rate"].exp()
    steps = torch.nn.functional.softplus(params["blocks.0.delta.step_bias"])
    for values, low, high in ((rates, 1.0, 16.0), (steps, 0.001, 0.1)):
        assert low <= values.min() < low + 0.1 * (high - low)
        assert high - 0.2 * (high - low) < values.max() <= high
    conv = params["blocks.0.delta.conv"]
    assert 0.95 * 3**-0.5 < conv.abs().max() <= 3**-0.5
    assert conv.std() > 0.9 / 3  # of a uniform number


def test_patterns_and_options_are_refused_by_name():
    config = TransformerConfig
    for options, words in (
        ({"layers": ()}, "layers .*at least one kind"),
        ({"layers": ("sliding",)}, "window= with sliding"),
        ({"layers": ("sparse",)}, "layers"),
        ({"rotary_width": 3}, "rotary_width of at most head_width=32, got 3"),
        ({"rotary_width": 34}, "rotary_width of at most head_width=32, got 34"),
        ({"delta_heads": 4, "delta_key_heads": 3}, "delta_key_heads to divide delta_heads=4"),
        ({"window": 0}, "window"),
        ({"logit_cap": 0.0}, "logit_cap"),
        ({"activation": "relu"}, "activation"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"TransformerConfig expects .*{words}"):
            config(**options)
    assert captured_runs(config())
    assert config(window=5, num_layers=1, layers=("full", "delta")).kinds == ("full",)
    assert not captured_runs(config(norm_offset=1.0))


@pytest.mark.parametrize("name", OPTIONS)
def test_the_captured_sampler_takes_no_network_with_an_option(name):
    """Its program knows of none, and would draw from another network."""
    with FakeTensorMode():
        leaf = torch.empty(1, device="cuda", dtype=torch.bfloat16)
    captured = is_captured(hybrid(name), {"embed.weight": leaf}, None)
    assert captured == (name == "full")


def test_functions_that_do_not_fit_a_layer_are_refused_by_name():
    def windowless(q, k, v):
        return ops.attend_causal(q, k, v)

    sliding, delta = hybrid("sliding"), hybrid("delta and full")
    params = spread_params(sliding)
    apply = funcrl.functional(sliding)
    with pytest.raises(ValueError, match="Transformer expects .*sliding layer, got windowless"):
        apply(params, TOKENS, SAMPLE.positions, attend=windowless)
    with pytest.raises(ValueError, match=r"Transformer expects attend= with one .*, got 1\."):
        apply(params, TOKENS, SAMPLE.positions, attend=[ops.attend_causal])
    params, apply = spread_params(delta), funcrl.functional(delta)
    with pytest.raises(ValueError, match="one function a layer .*delta layers.* got attend_causal"):
        apply(params, TOKENS, SAMPLE.positions, attend=ops.attend_causal)
    options = funcrl.config.TrainConfig(model="micro-hybrid", packing="prefixes")
    with pytest.raises(
        ValueError, match="train expects --packing none or samples .*carries a state"
    ):
        funcrl.build(options)
    rows = funcrl.pack_groups(tiny_rollout(), funcrl.grpo(), 21)
    step = funcrl.grpo_step(funcrl.logprob_fn(delta))
    with pytest.raises(ValueError, match="logprob_fn expects rows without shared prefixes"):
        step(step.init(params), rows)


def test_each_layer_may_have_a_function_of_its_own():
    model = hybrid("delta and full")
    params, apply = spread_params(model), funcrl.functional(model)
    layers = model.each_layer(ops.attend_causal, recur_causal)
    plain = apply(params, TOKENS, SAMPLE.positions)
    assert torch.equal(apply(params, TOKENS, SAMPLE.positions, attend=layers), plain)
    # Each token a sample of its own, in delta layers alone.
    layers = model.each_layer(ops.attend_causal, recur_segments(torch.arange(len(TOKENS))))
    apart = apply(params, TOKENS, SAMPLE.positions, attend=layers)
    assert torch.equal(apart[0], plain[0])
    assert not torch.equal(apart[1], plain[1])
