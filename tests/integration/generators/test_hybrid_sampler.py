"""The sampler on sliding and delta layers: its log-probabilities are the trainer's."""

from functools import partial

import pytest
import torch
from cases import tiny_model
from hybrids import OPTIONS, hybrid, spread_params

import funcrl
from funcrl.generators import Sampler, Sampling, sample
from funcrl.generators.embedded import sampler
from funcrl.generators.packed import PackedBlock, pack_weights
from funcrl.loop.parity import ParityConfig

# Of different lengths, so that shorter ones are padded; slots are fewer than samples, so that
# prompts enter while others are under way, and rows move when samples end.
PROMPTS = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3], [5, 8]]
SAMPLING = Sampling(num_samples=3, max_tokens=9, stop_tokens=(0, 7))
SLOTS = 5


def teacher_forced(model_fn, params, samples):
    """The trainer's log-probability of every sampled token [B, S]."""
    scored = torch.zeros_like(samples.logprobs)
    for row, drawn in enumerate(samples.tokens):
        prompt = PROMPTS[row // SAMPLING.num_samples]
        count = int(samples.mask[row].sum())
        tokens = torch.tensor([*prompt, *drawn[:count].tolist()])
        scores = model_fn(params, funcrl.Sample(tokens, torch.arange(len(tokens))))
        scored[row, :count] = scores.logprobs[len(prompt) :]
    return scored


@pytest.mark.parametrize("name", OPTIONS)
def test_exact_log_probabilities_have_the_trainers_bits(name):
    model = hybrid(name, numerics="exact")
    params = spread_params(model, torch.float32)
    samples = sample(model, params, PROMPTS, SAMPLING, seed=1, slots=SLOTS)
    assert samples.mask.sum(dim=1).unique().numel() > 2  # rows leave at different times
    forced = teacher_forced(funcrl.logprob_fn(model), params, samples)
    assert torch.equal(samples.policy_logprobs, forced)


@pytest.mark.parametrize("name", ["delta and full", "all"])
def test_half_precision_has_the_trainers_bits(name):
    """Weights of float32 that the trainer casts where they are used, and the sampler beforehand."""
    model = hybrid(name, numerics="exact")
    params = spread_params(model, torch.float32)
    sampler = Sampler(model, slots=SLOTS, dtype=torch.bfloat16)
    sampler.push(params)
    samples = sampler.generate(PROMPTS, SAMPLING, seed=1)
    forced = teacher_forced(funcrl.logprob_fn(model, dtype=torch.bfloat16), params, samples)
    assert torch.equal(samples.policy_logprobs, forced)


@pytest.mark.parametrize("name", OPTIONS)
def test_native_log_probabilities_are_the_trainers(name):
    """In float64, where the rounding of other shapes is below 1e-12."""
    model = hybrid(name)
    params = spread_params(model)
    samples = sample(model, params, PROMPTS, SAMPLING, seed=1, slots=SLOTS)
    forced = teacher_forced(funcrl.logprob_fn(model), params, samples)
    assert (samples.policy_logprobs - forced).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["sliding", "delta", "all"])
def test_neighbours_move_no_bit_of_a_sample(name):
    model = hybrid(name, numerics="exact")
    params = spread_params(model, torch.float32)
    together = sample(model, params, PROMPTS, SAMPLING, seed=1, slots=SLOTS)
    for index, prompt in enumerate(PROMPTS):
        alone = sample(model, params, [prompt], SAMPLING, seed=1)
        rows, width = slice(3 * index, 3 * index + 3), alone.tokens.shape[1]
        assert torch.equal(alone.tokens, together.tokens[rows, :width])
        assert torch.equal(alone.policy_logprobs, together.policy_logprobs[rows, :width])


@pytest.mark.parametrize("name", ["gate and biases", "delta and full"])
def test_weights_laid_out_for_decoding_are_those_of_the_network(name):
    """Matrices large enough for oneDNN's layout, joined where they multiply one input."""
    model = hybrid(name, width=256, mlp_width=1024, head_width=64, num_layers=2,
                   delta_heads=4, delta_key_heads=4, delta_key_width=64,
                   delta_value_width=64)  # fmt: skip
    params = funcrl.init_params(model, seed=0)
    network = pack_weights(model, params)
    assert network.ops is not model.ops
    tokens = torch.tensor([[3, 1, 4, 1, 5]])
    expected = funcrl.functional(model)(params, tokens, torch.arange(5)[None])
    with torch.inference_mode():
        found = network(tokens, torch.arange(5)[None])
    assert (found - expected).abs().max() <= 1e-5
    samples = sample(model, params, PROMPTS, SAMPLING, seed=1, slots=SLOTS)
    forced = teacher_forced(funcrl.logprob_fn(model), params, samples)
    assert (samples.policy_logprobs - forced).abs().max() <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*OPTIONS, "biases without norms"])
def test_blocks_in_few_calls_draw_what_their_operations_do(name, dtype, monkeypatch):
    biased = {"qkv_bias": True, "qk_norm": False}
    model = tiny_model(**biased) if name not in OPTIONS else hybrid(name)
    params = spread_params(model, dtype)
    found = sample(model, params, PROMPTS, SAMPLING, seed=1, slots=SLOTS)
    by_operation = partial(pack_weights, by_operation=True)
    monkeypatch.setattr(sampler, "pack_weights", by_operation)
    expected = sample(model, params, PROMPTS, SAMPLING, seed=1, slots=SLOTS)
    assert torch.equal(found.tokens, expected.tokens)
    assert torch.equal(found.policy_logprobs, expected.policy_logprobs)
    blocks = pack_weights(model, params).blocks
    packed = {block.kind for block in blocks if isinstance(block, PackedBlock)}
    changed = {"gate", "gate and biases", "partial rotation", "partial rotation without norms",
               "scale", "offset", "post norms", "gelu", "all"}  # fmt: skip
    assert packed == (set() if name in changed else {*model.config.kinds} - {"delta"})
    assert not any(isinstance(block, PackedBlock) for block in by_operation(model, params).blocks)


def test_a_parity_check_covers_the_layers_of_a_hybrid():
    config = ParityConfig(
        model="micro-hybrid", numerics="exact", num_prompts=2, max_tokens=6, num_samples=2
    )
    result = funcrl.parity(config)
    assert result.bitwise
    assert {row.equal for row in result.rows} == {True}
