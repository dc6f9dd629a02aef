"""Qwen3.5's and Gemma 3's text models: transformers' folders, read and written back."""


import pytest
import torch
from test_weights import logits, logits_of
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

import funcrl

SHAPE = {
    "vocab_size": 48, "hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
}  # fmt: skip
DELTA = {
    "num_hidden_layers": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 6,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e3, "partial_rotary_factor": 0.5},
}  # fmt: skip
SLIDING = {
    "num_hidden_layers": 5, "sliding_window": 7, "sliding_window_pattern": 3,
    "query_pre_attn_scalar": 20, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
    },
}  # fmt: skip
KINDS = {
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA | {"tie_word_embeddings": False}),
    "qwen3.5-tied": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA | {"tie_word_embeddings": True}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, SLIDING | {"tie_word_embeddings": False}),
    "gemma3-capped": (
        Gemma3ForCausalLM, Gemma3TextConfig, SLIDING | {"final_logit_softcapping": 3.0}
    ),
}  # fmt: skip


def randomised(peer):
    torch.manual_seed(0)
    with torch.no_grad():
        for leaf in peer.parameters():  # norms and rates too, so that none is 1 or 0
            leaf.copy_(torch.randn_like(leaf) * 0.3)
    return peer.eval()


def theirs(kind):
    network, config, options = KINDS[kind]
    return randomised(network(config(**SHAPE, **options)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_transformers_gives_its_logits(tmp_path, kind):
    peer = theirs(kind)
    peer.save_pretrained(tmp_path)
    model, params = funcrl.load_params(tmp_path)
    mine, wanted = logits(model, params), logits_of(peer)
    print("MAX", kind, (mine - wanted).abs().max().item(), wanted.abs().max().item())
    assert (mine - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_what_was_written(tmp_path, kind):
    peer = theirs(kind)
    peer.save_pretrained(tmp_path / "theirs")
    model, params = funcrl.load_params(tmp_path / "theirs")
    folder = funcrl.save_params(tmp_path / "mine", model, params, max_shard_bytes=10_000)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert type(again) is type(peer)
    assert torch.equal(logits_of(again), logits_of(peer))
    wanted = peer.state_dict()
    assert all(torch.equal(leaf, wanted[name]) for name, leaf in again.state_dict().items())
    same, back = funcrl.load_params(folder)
    assert same.config == model.config
    assert back.keys() == params.keys()
    assert all(torch.equal(back[name], leaf) for name, leaf in params.items())
