"""Qwen3.5's and Gemma 3's text models: transformers' folders, read and written back."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import logits, logits_of, rewrite
from transformers import (
    AutoModelForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    Qwen3_5Config,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5TextConfig,
)

import funcrl
from funcrl.models import SHAPES, TransformerConfig, shape
from funcrl.weights import from_hugging_face, load_config, to_hugging_face
from funcrl.weights.hugging_face import same_network

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
# The config.json files of released models, but for what is about training and tokens. They are
# from memory and from what others have published of them, not from the hub itself.
_HYBRID = ["linear_attention"] * 3 + ["full_attention"]
RELEASED = {
    "qwen3.5-0.8b": {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "model_type": "qwen3_5",
        "tie_word_embeddings": True, "image_token_id": 248056, "vision_config": {"depth": 12},
        "text_config": {
            "model_type": "qwen3_5_text", "attention_bias": False, "attn_output_gate": True,
            "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu",
            "hidden_size": 1024, "intermediate_size": 3584, "layer_types": _HYBRID * 6,
            "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16,
            "linear_num_value_heads": 16, "linear_value_head_dim": 128, "mlp_only_layers": [],
            "mamba_ssm_dtype": "float32", "max_position_embeddings": 262144,
            "mtp_num_hidden_layers": 1, "num_attention_heads": 8, "num_hidden_layers": 24,
            "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "tie_word_embeddings": True,
            "vocab_size": 248320, "rope_parameters": {
                "mrope_interleaved": True, "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_type": "default",
            },
        },
    },
    "gemma3-270m": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "_sliding_window_pattern": 6, "attention_bias": False, "attn_logit_softcapping": None,
        "final_logit_softcapping": None, "head_dim": 256, "hidden_size": 640,
        "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 2048,
        "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 3,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 18,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000.0, "rope_scaling": None, "rope_theta": 1000000.0,
        "sliding_window": 512, "use_bidirectional_attention": False, "vocab_size": 262144,
    },
    "gemma3-1b": {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text",
        "attention_bias": False, "attn_logit_softcapping": None, "cache_implementation": "hybrid",
        "final_logit_softcapping": None, "head_dim": 256, "hidden_size": 1152,
        "hidden_activation": "gelu_pytorch_tanh", "intermediate_size": 6912,
        "max_position_embeddings": 32768, "num_attention_heads": 4, "num_hidden_layers": 26,
        "num_key_value_heads": 1, "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6,
        "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": 512, "sliding_window_pattern": 6, "vocab_size": 262144,
    },
    "gemma3-4b": {  # which leaves the rest to transformers
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {"hidden_size": 1152},
    },
}  # fmt: skip
KINDS = {
    "qwen3.5": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA | {"tie_word_embeddings": False}),
    "qwen3.5-tied": (Qwen3_5ForCausalLM, Qwen3_5TextConfig, DELTA | {"tie_word_embeddings": True}),
    "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, SLIDING | {"tie_word_embeddings": False}),
    "gemma3-capped": (
        Gemma3ForCausalLM, Gemma3TextConfig, SLIDING | {"final_logit_softcapping": 3.0}
    ),
    "gemma3-full": (
        Gemma3ForCausalLM, Gemma3TextConfig, SLIDING | {"layer_types": ["full_attention"] * 5}
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
    assert (logits(model, params) - logits_of(peer)).abs().max() <= 1e-4


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


def nested(kind):
    """A small model with a vision part."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    if kind == "qwen3.5":
        vision |= {"depth": 1, "out_hidden_size": 24, "num_position_embeddings": 16}
        config = Qwen3_5Config(text_config=SHAPE | DELTA, vision_config=vision)
        return randomised(Qwen3_5ForConditionalGeneration(config))
    vision |= {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config=SHAPE | SLIDING, vision_config=vision, mm_tokens_per_image=4, image_token_id=1
    )
    return randomised(Gemma3ForConditionalGeneration(config))


@pytest.mark.parametrize("kind", ["qwen3.5", "gemma3"])
def test_the_text_model_of_a_larger_one_is_read_and_nothing_else(tmp_path, kind):
    peer = nested(kind)
    peer.save_pretrained(tmp_path)
    if kind == "qwen3.5":  # the released files have a head that predicts several tokens
        weights = tmp_path / "model.safetensors"
        save_file(load_file(weights) | {"mtp.norm.weight": torch.zeros(3)}, weights)
    model, params = funcrl.load_params(tmp_path)
    assert params["blocks.0.mlp_norm.weight"].shape == (24,)
    assert (logits(model, params) - logits_of(peer)).abs().max() <= 1e-4
    with pytest.raises(ValueError, match="^save_params expects a new folder.* besides the text"):
        funcrl.save_params(tmp_path, model, params)
    alone = funcrl.save_params(tmp_path / "alone", model, params)
    again = AutoModelForCausalLM.from_pretrained(alone)
    assert torch.equal(logits_of(again), logits_of(peer))


def test_a_text_model_under_a_larger_ones_names_is_read(tmp_path):
    theirs("qwen3.5").save_pretrained(tmp_path)
    _, params = funcrl.load_params(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors = load_file(weights)
    moved = {name.replace("model.", "model.language_model.", 1): x for name, x in tensors.items()}
    save_file(moved, weights)
    _, same = funcrl.load_params(tmp_path)
    assert all(torch.equal(same[name], leaf) for name, leaf in params.items())
    save_file(moved | {"model.norm.weight": torch.zeros(24)}, weights)
    with pytest.raises(ValueError, match=r"^load_params expects one 'model.norm.weight'"):
        funcrl.load_params(tmp_path)


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", "gemma3-270m", "gemma3-1b"])
def test_the_released_configs_are_the_named_shapes(name):
    config = from_hugging_face(RELEASED[name], name)
    assert config == shape(name, config.vocab_size)


def test_what_a_released_config_leaves_out_is_as_in_transformers():
    config = from_hugging_face(RELEASED["gemma3-4b"], "4b")
    assert config == TransformerConfig(
        vocab_size=262_208, width=2560, num_layers=34, num_heads=8, num_kv_heads=4, head_width=256,
        mlp_width=10_240, layers=("sliding",) * 5 + ("full",), window=1024, rope_theta=1e6,
        local_rope_theta=1e4, rope_factor=8.0, norm_offset=1.0, post_norms=True,
        activation="gelu_tanh", embed_scale=2560**0.5, context_length=131_072,
    )  # fmt: skip
    classes = {"qwen3.5-0.8b": Qwen3_5Config, "gemma3-270m": Gemma3TextConfig,
               "gemma3-1b": Gemma3TextConfig, "gemma3-4b": Gemma3Config}  # fmt: skip
    for name, values in RELEASED.items():  # as their own classes complete them
        theirs = classes[name](**values).to_dict() | {"architectures": values["architectures"]}
        assert from_hugging_face(theirs, name) == from_hugging_face(values, name)
    for config_class, network in ((Qwen3_5TextConfig, "Qwen3_5"), (Gemma3TextConfig, "Gemma3")):
        described = {"architectures": [f"{network}ForCausalLM"]}
        whole = config_class().to_dict() | described
        assert from_hugging_face(described, "nothing") == from_hugging_face(whole, "all")


@pytest.mark.parametrize("name", SHAPES)
def test_every_named_shape_is_written_and_read_as_the_same(name):
    config = SHAPES[name]
    assert same_network(from_hugging_face(to_hugging_face(config, "float32"), "here")) == (
        same_network(config)
    )


FULL = {"rope_type": "default", "rope_theta": 5e4}
# config.json: the kind, what is changed, and what the error says.
REFUSED = {
    "gate": ("qwen3.5", {"attn_output_gate": False}, "attn_output_gate True, got False"),
    "bias": ("qwen3.5", {"attention_bias": True}, "attention_bias False, got True"),
    "experts": ("qwen3.5", {"mlp_only_layers": [1]}, r"mlp_only_layers \[\], got \[1\]"),
    "state": ("qwen3.5", {"mamba_ssm_dtype": "bfloat16"}, "mamba_ssm_dtype .*'bfloat16'"),
    "act": ("qwen3.5", {"hidden_act": "gelu"}, "hidden_act 'silu', got 'gelu'"),
    "yarn": ("qwen3.5", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type .*'yarn'"),
    "rope": ("qwen3.5", {"rope_parameters": {"beta": 2}}, "rope_parameters.beta None, got 2"),
    "width": ("qwen3.5", {"rope_parameters": {"partial_rotary_factor": 2}}, "rotary_width"),
    "bases": ("qwen3.5", {"rope_theta": 3.0}, r"one rope_theta .*\[3.0, 5000.0\]"),
    "alien": ("qwen3.5", {"layer_types": ["sliding_attention"] * 4}, "linear_attention and full"),
    "few": ("qwen3.5", {"layer_types": ["full_attention"] * 3}, "name 4 layers, got 3"),
    "text": ("qwen3.5", {"layer_types": "full_attention"}, "layer_types .*'full_attention'"),
    "interval": ("qwen3.5", {"layer_types": None, "full_attention_interval": 0},
                 "full_attention_interval .*above 0, got 0"),
    "heads": ("qwen3.5", {"linear_num_key_heads": 3}, "delta_key_heads to divide"),
    "large": ("qwen3.5", {"linear_conv_kernel_dim": 1 << 20}, "linear_conv_kernel_dim .*at most"),
    "quantised": ("qwen3.5", {"quantization_config": {"bits": 4}}, "quantization_config"),
    "scores": ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping None, got 50"),
    "both ways": ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    "relu": ("gemma3", {"hidden_activation": "relu"}, "hidden_activation .*'relu'"),
    "partial": ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor 1, got 0.5"),
    "window": ("gemma3", {"sliding_window": None}, "sliding_window .*None"),
    "scalar": ("gemma3", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar .*got 0"),
    "cap": ("gemma3", {"final_logit_softcapping": -1}, "final_logit_softcapping .*got -1"),
    "local": ("gemma3", {"rope_parameters": {"sliding_attention": {"rope_type": "linear"}}},
              "sliding_attention.rope_type .*'linear'"),
    "global": ("gemma3", {"rope_parameters": {"full_attention": {"rope_type": "llama3"}}},
               "full_attention.rope_type .*'llama3'"),
    "flat": ("gemma3", {"rope_parameters": FULL}, "rope_parameters.rope_t.*"),
    "no object": ("gemma3", {"rope_parameters": {"full_attention": 3}}, "an object .*got 3"),
    "factors": ("gemma3", {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
                r"one factor .*\[2.0, 4.0\]"),
    "other": ("gemma3", {"model_type": "gemma2"}, "model_type 'gemma3_text', got 'gemma2'"),
}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for kind in ("qwen3.5", "gemma3"):
        made[kind] = tmp_path_factory.mktemp(kind)
        theirs(kind).save_pretrained(made[kind])
    return made


@pytest.mark.parametrize("row", REFUSED)
def test_a_config_of_another_network_is_refused(folders, tmp_path, row):
    kind, changes, message = REFUSED[row]
    folder = tmp_path / "model"
    shutil.copytree(folders[kind], folder)
    load_config(folder)
    rewrite(folder, **changes)
    with pytest.raises(ValueError, match=f"^load_params .*{message}"):
        load_config(folder)


def test_tied_and_not_at_once_is_refused():
    values = RELEASED["qwen3.5-0.8b"] | {"tie_word_embeddings": False}
    with pytest.raises(ValueError, match="^load_params expects one tie_word_embeddings"):
        from_hugging_face(values, "here")


def test_a_tensor_of_another_shape_is_named(folders, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(folders["qwen3.5"], folder)
    weights = folder / "model.safetensors"
    name = "model.layers.3.self_attn.q_proj.weight"
    tensors = load_file(weights)
    save_file(tensors | {name: tensors[name][:32].clone()}, weights)
    with pytest.raises(ValueError, match=rf"^load_params expects '{name}' of shape \[64, 24\]"):
        load_config(folder)


@pytest.mark.parametrize(("reason", "changes"), [
    ("logit_cap=3.0", {"logit_cap": 3.0}),
    ("attention_gate=False", {"layers": ("delta", "full"), "norm_offset": 1.0}),
    ("qk_norm=True", {"layers": ("sliding",), "window": 3}),
    ("layers=", {"layers": ("sliding", "delta"), "window": 3}),
    ("attention_scale=0.3", {"attention_scale": 0.3}),
    ("rotary_width=4", {"rotary_width": 4}),
    ("embed_scale=2.0", {"embed_scale": 2.0}),
])  # fmt: skip
def test_a_network_that_no_family_has_is_not_saved(tmp_path, reason, changes):
    model = funcrl.models.Transformer(TransformerConfig(**changes))
    params = funcrl.init_params(model, seed=0)
    for path in (tmp_path / "x", tmp_path / "x.gguf"):
        with pytest.raises(ValueError, match=f"^save_params .*because of .*{reason}"):
            funcrl.save_params(path, model, params)
        assert not path.exists()


@pytest.mark.parametrize("kind", ["qwen3.5", "gemma3"])
def test_a_gguf_file_of_these_is_refused(folders, tmp_path, kind):
    model, params = funcrl.load_params(folders[kind])
    with pytest.raises(ValueError, match="^save_params supports llama, qwen2, qwen3 in a .gguf"):
        funcrl.save_params(tmp_path / "model.gguf", model, params)
    assert not list(tmp_path.iterdir())


def test_what_makes_no_difference_is_the_same_network():
    plain = TransformerConfig()
    for changes in ({"layers": ("full", "full")}, {"window": 3}, {"delta_conv": 7},
                    {"local_rope_theta": 3.0}, {"rotary_width": plain.head_width},
                    {"attention_scale": plain.head_width**-0.5}, {"numerics": "exact"},
                    {"context_length": 7}):  # fmt: skip
        assert same_network(TransformerConfig(**changes)) == same_network(plain)
    assert same_network(TransformerConfig(rotary_width=4)) != same_network(plain)
    sliding = TransformerConfig(layers=("sliding",), window=3)
    assert same_network(sliding) != same_network(TransformerConfig(layers=("sliding",), window=4))
