"""Llama 3's scaled rotation: transformers' logits, the same file again, equal bits when drawn."""

import math
from dataclasses import replace

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import funcrl
from funcrl.config import Sampling

# factor, low_freq_factor, high_freq_factor, original_max_position_embeddings
SCALINGS = [(8.0, 1.0, 4.0, 64), (32.0, 1.0, 4.0, 128), (2.0, 0.5, 8.0, 32)]
NAMES = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def llama(folder, scaling):
    """A tiny network of transformers, saved in a folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=50, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=512, rope_theta=500.0,
        rope_scaling={"rope_type": "llama3", **dict(zip(NAMES, scaling, strict=True))},
        tie_word_embeddings=False, attn_implementation="eager",
    )  # fmt: skip
    network = LlamaForCausalLM(config).eval()
    network.save_pretrained(folder)
    return network


@pytest.mark.parametrize("scaling", SCALINGS)
def test_angles_are_those_of_a_loop(scaling):
    """In float64, pair by pair, as Llama 3's own code has it."""
    factor, low, high, context = scaling
    for width, theta in ((16, 500.0), (64, 500_000.0)):
        found = funcrl.models.rotary_angles(torch.tensor([0, 7, 300]), width, theta, scaling)
        for pair in range(width // 2):
            frequency = theta ** (-2 * pair / width)
            wavelength = 2 * math.pi / frequency
            if wavelength > context / low:
                frequency /= factor
            elif wavelength >= context / high:
                smooth = (context / wavelength - low) / (high - low)
                frequency *= (1 - smooth) / factor + smooth
            for row, position in enumerate((0, 7, 300)):
                assert found[row, pair].item() == pytest.approx(position * frequency, rel=3e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_logits_are_transformers_and_the_network_is_saved_as_the_same(tmp_path, scaling):
    network = llama(tmp_path / "theirs", scaling)
    model, params = funcrl.load_params(tmp_path / "theirs")
    assert model.config.rope_scaling == scaling
    tokens, places = torch.randint(0, 50, (300,)), torch.arange(300)
    with torch.no_grad():
        wanted = network(tokens[None]).logits[0]
    found = funcrl.functional(model)(params, tokens, places)
    assert (found - wanted).abs().max() <= 1e-5
    plain = funcrl.models.Transformer(replace(model.config, rope_scaling=()))
    assert (funcrl.functional(plain)(params, tokens, places) - wanted).abs().max() > 1e-3
    funcrl.save_params(tmp_path / "ours", model, params)
    again, same = funcrl.load_params(tmp_path / "ours")
    assert again.config == model.config
    assert torch.equal(funcrl.functional(again)(same, tokens, places), found)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "ours", attn_implementation="eager")
    with torch.no_grad():
        assert torch.equal(theirs(tokens[None]).logits[0], wanted)


@pytest.mark.parametrize("numerics", ["native", "exact"])
def test_what_is_drawn_is_scored_alike(tmp_path, numerics):
    llama(tmp_path / "theirs", SCALINGS[0])
    model, params = funcrl.load_params(tmp_path / "theirs")
    model = funcrl.models.Transformer(replace(model.config, numerics=numerics))
    sampler = funcrl.generators.Sampler(model)
    sampler.push(params)
    samples = sampler.generate([[1, 2, 3]] * 2, Sampling(4, max_tokens=120), seed=0)
    tokens = torch.cat([torch.tensor([[1, 2, 3]] * 8), samples.tokens], dim=1)
    rows = funcrl.types.Sample(tokens, torch.arange(tokens.shape[1]).expand_as(tokens))
    scored = funcrl.models.logprobs.score(funcrl.logprob_fn(model), params, rows).logprobs[:, 3:]
    if numerics == "exact":
        assert torch.equal(scored, samples.logprobs)
    else:
        assert (scored - samples.logprobs).abs().max() <= 1e-5


def test_a_gguf_file_would_be_another_network(tmp_path):
    llama(tmp_path / "theirs", SCALINGS[0])
    model, params = funcrl.load_params(tmp_path / "theirs")
    with pytest.raises(ValueError, match="^save_params expects a network that GGUF describes"):
        funcrl.save_params(tmp_path / "model.gguf", model, params)
    assert not (tmp_path / "model.gguf").exists()


@pytest.mark.parametrize("scaling", [(8.0, 1.0, 4.0), (8.0, 4.0, 1.0, 64.0), (0.0, 1.0, 4.0, 64.0)])
def test_what_is_no_scaling_is_refused(scaling):
    with pytest.raises(ValueError, match="^TransformerConfig expects rope_scaling"):
        funcrl.models.TransformerConfig(rope_scaling=scaling)


@pytest.mark.parametrize("numerics", ["native", "exact"])
def test_gradients_of_samples_are_those_of_autograd(numerics):
    config = funcrl.models.TransformerConfig(
        vocab_size=13, width=16, num_layers=1, num_heads=2, num_kv_heads=1, head_width=8,
        mlp_width=24, numerics=numerics, rope_scaling=SCALINGS[2],
    )  # fmt: skip
    model = funcrl.models.Transformer(config)
    params, model_fn = funcrl.init_params(model, seed=0), funcrl.logprob_fn(model)
    tokens = torch.randint(0, 13, (3, 40), generator=torch.Generator().manual_seed(0))
    places = torch.arange(40).expand(3, 40)

    def loss(params, tokens, places):
        return model_fn(params, funcrl.types.Sample(tokens, places)).logprobs.sum()

    each = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, tokens, places)
    for row in range(3):
        leaves = {name: leaf.clone().requires_grad_() for name, leaf in params.items()}
        found = torch.autograd.grad(loss(leaves, tokens[row], places[row]), leaves.values())
        for name, grad in zip(leaves, found, strict=True):
            torch.testing.assert_close(each[name][row], grad, rtol=1e-4, atol=1e-5)
