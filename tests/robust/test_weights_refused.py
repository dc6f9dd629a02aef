"""What a checkpoint may not say, table by table: each row is an error that names the file."""

import json
import struct

import numpy
import pytest
import torch
from safetensors.torch import load_file, save_file
from saved_models import SHAPE, close, logits, logits_of, rewrite, saved, theirs, write_gguf
from transformers import LlamaConfig, LlamaForCausalLM

import funcrl
from funcrl import weights
from funcrl.weights import families, hugging_face
from funcrl.weights import gguf as gguf_module
from funcrl.weights.families import PLAIN_ROPE

THETA = {"rope_type": "default", "rope_theta": 5000.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
# config.json: what is changed, and what the error says.
CONFIGS = {
    # transformers' class has these, if the weights fit.
    "hidden_act": ({"hidden_act": "nothing"}, "transformers .* loads, got KeyError: .*nothing"),
    "attention_bias": ({"attention_bias": True}, "missing .*k_proj.bias"),
    "mlp_bias": ({"mlp_bias": True}, "missing .*down_proj.bias"),
    "use_sliding_window": ({"use_sliding_window": True}, "use_sliding_window .*True"),
    "partial_rotary_factor": ({"partial_rotary_factor": 0.5}, " partial_rotary_factor .*0.5"),
    "pretraining_tp": ({"pretraining_tp": 2}, "pretraining_tp .*2"),
    "is_causal": ({"is_causal": False}, "is_causal .*False"),
    "quantization_config": ({"quantization_config": {"bits": 4}}, "quantization_config .*4"),
    "layer_types": ({"layer_types": ["sliding_attention"] * 2}, "layer_types .*sliding"),
    "model_type": ({"model_type": "mistral"}, "model_type .*'mistral'"),
    "rope_type": ({"rope_scaling": {"rope_type": "yarn"}}, "got KeyError: .*'yarn'"),
    "biases quantised": ({"attention_bias": True, "quantization_config": {"bits": 4}},
                         "attention_bias .*True"),
    "both": ({"rope_parameters": THETA, "rope_scaling": LLAMA3},
             "rope_parameters.rope_type None, got 'default'"),
    "two factors": ({"rope_parameters": LLAMA3 | {"factor": 4.0}, "rope_scaling": LLAMA3},
                    r"one factor .*\[8.0, 4.0\]"),
    "no factor": ({"rope_scaling": {"rope_type": "llama3"}, "rope_parameters": None},
                  "rope_scaling.factor .*None"),
    "low above high": ({"rope_scaling": LLAMA3 | {"low_freq_factor": 5.0}, "rope_parameters": None},
                       "config.json.*rope_scaling to be a factor, low, high above it"),
    "another": ({"rope_scaling": LLAMA3 | {"beta_fast": 32}, "rope_parameters": None},
                "rope_scaling.beta_fast None, got 32"),
    "type": ({"rope_scaling": {"type": "linear"}, "rope_parameters": None},
             "rope_scaling.factor .*None"),
    "factor": ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor .*4.0"),
    "partial inside": ({"rope_parameters": THETA | {"partial_rotary_factor": 0.5}},
                       "rope_parameters.partial_rotary_factor .*0.5"),
    "nested": ({"rope_parameters": {"full_attention": THETA}}, "rope_parameters.full_attention"),
    "two bases": ({"rope_theta": 123.0}, " rope_theta .*123.0"),
    "rope text": ({"rope_parameters": "x"}, " rope_parameters .*'x'"),
    "theta null": ({"rope_theta": None}, " rope_theta .*None"),
    "theta null inside": ({"rope_parameters": {"rope_theta": None}},
                          "rope_parameters.rope_theta .*None"),
    "eps null": ({"rms_norm_eps": None}, "rms_norm_eps .*None"),
    "eps text": ({"rms_norm_eps": "1e-5"}, "rms_norm_eps .*'1e-5'"),
    "eps infinite": ({"rms_norm_eps": float("inf")}, "rms_norm_eps .*inf"),
    "tied text": ({"tie_word_embeddings": "false"}, "tie_word_embeddings .*'false'"),
    "width text": ({"hidden_size": "24"}, "hidden_size .*config.json .*'24'"),
    "heads 0": ({"num_attention_heads": 0}, "num_attention_heads .* 0"),
    "heads": ({"num_key_value_heads": 4}, "config.json.*TransformerConfig"),
    "architectures 5": ({"architectures": 5}, "LlamaForCausalLM, .* 5 "),
    "architectures {}": ({"architectures": [{}]}, "LlamaForCausalLM, .* {} "),
    "architectures empty": ({"architectures": ""}, "LlamaForCausalLM, .* '' "),
    "architectures text": ({"architectures": "LlamaForCausalLM"}, None),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("row", CONFIGS)
def test_a_config_of_another_network_is_refused(tmp_path, row):
    folder = saved(tmp_path)
    changes, message = CONFIGS[row]
    rewrite(folder, **changes)
    if message is None:
        assert funcrl.load_params(folder)
        return
    with pytest.raises(ValueError, match=f"^load_params .*{message}"):
        funcrl.load_params(folder)


@pytest.mark.parametrize("changes", [
    {"layer_types": ["full_attention"] * 2, "sliding_window": 4, "use_sliding_window": None},
    {"rope_scaling": None, "rope_parameters": {}, "rope_theta": 5000},
    {"rope_scaling": {"type": "default", "factor": 1.0}, "rope_theta": 5000.0},
    {"head_dim": None, "quantization_config": None, "is_causal": None, "model_type": ...},
])  # fmt: skip
def test_a_config_that_says_the_same_in_other_words_is_taken(tmp_path, changes):
    folder = saved(tmp_path)
    config = weights.load_config(folder)
    rewrite(folder, **changes)
    assert weights.load_config(folder) == config


def test_every_option_has_its_row():
    options = hugging_face._PLAIN.keys() | families._LLAMA.plain.keys() | PLAIN_ROPE.keys()
    assert options <= CONFIGS.keys()
    assert gguf_module._PLAIN.keys() <= METADATA.keys()


def test_deep_json_is_an_error_that_names_the_file(tmp_path):
    folder = saved(tmp_path)
    (folder / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"^load_params .*JSON .*config.json"):
        funcrl.load_params(folder)


# --- tensors and indices ----------------------------------------------------------------------


def change_header(folder, change):
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    end = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:end])
    text = change(header)
    text = (text if isinstance(text, str) else json.dumps(header)).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + raw[end:])


NORM, UP, GATE = "model.norm.weight", "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate_proj"
HEADERS = {
    "overlap": (lambda h: h[f"{UP}.weight"].update(
        data_offsets=h[f"{GATE}.weight"]["data_offsets"]), "whole safetensors"),
    "fractions": (lambda h: h[NORM].update(data_offsets=[0.5, 96.5]), "whole safetensors"),
    "text": (lambda h: h[NORM].update(shape=["24"]), "whole safetensors"),
    "a fraction": (lambda h: h[NORM].update(shape=[24.7]), "whole safetensors"),
    "true": (lambda h: h[NORM].update(shape=[24, True]), "whole safetensors"),
    "negative": (lambda h: h[NORM].update(data_offsets=[-8, 88]), "whole safetensors"),
    "a list": (lambda h: "[1]", "whole safetensors"),
    "deep": (lambda h: "[" * 20_000, "whole safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("row", HEADERS)
def test_a_corrupt_header_is_refused(tmp_path, row):
    folder = saved(tmp_path)
    spoil, message = HEADERS[row]
    change_header(folder, spoil)
    with pytest.raises(ValueError, match=f"^load_params .*{message}"):
        funcrl.load_params(folder)


def test_junk_at_the_end_is_refused(tmp_path):
    folder = saved(tmp_path)
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"junk")
    with pytest.raises(ValueError, match="^load_params .*whole safetensors"):
        funcrl.load_params(folder)


@pytest.mark.parametrize("place", ["../x.safetensors", "/x.safetensors", "..", "x.bin", 3, None,
                                   ["x"]])  # fmt: skip
def test_an_index_names_files_beside_it(tmp_path, place):
    folder = saved(tmp_path)
    (folder / "model.safetensors").rename(tmp_path / "x.safetensors")
    places = dict.fromkeys(load_file(tmp_path / "x.safetensors"), place)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    with pytest.raises(ValueError, match="^load_params .*index.json"):
        funcrl.load_params(folder)


def test_a_tensor_is_in_one_shard(tmp_path):
    theirs("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    places = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    other = next(tmp_path / file for file in places.values() if file != places[NORM])
    save_file(load_file(other) | {NORM: torch.zeros(24)}, other, {"format": "pt"})
    with pytest.raises(ValueError, match=f"^load_params .*index.json.*'{NORM}'"):
        funcrl.load_params(tmp_path)


def test_one_whole_file_goes_before_an_index_as_in_transformers(tmp_path):
    theirs("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    peer = theirs("llama")
    with torch.no_grad():
        peer.model.norm.weight.mul_(2)
    peer.save_pretrained(tmp_path / "whole")
    (tmp_path / "whole" / "model.safetensors").rename(tmp_path / "model.safetensors")
    _, params = funcrl.load_params(tmp_path)
    assert torch.equal(params["norm.weight"], peer.model.norm.weight)
    assert torch.equal(LlamaForCausalLM.from_pretrained(tmp_path).model.norm.weight,
                       params["norm.weight"])  # fmt: skip


def test_weights_in_a_pickle_are_not_read(tmp_path):
    folder = saved(tmp_path)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="got pytorch_model.bin, which .* safetensors"):
        funcrl.load_params(folder)


@pytest.mark.slow
def test_a_tied_output_matrix_is_the_embedding_or_refused(tmp_path):
    folder = saved(tmp_path)
    rewrite(folder, tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"^load_params .*lm_head.weight.*tie_word_embeddings"):
        funcrl.load_params(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, path)
    assert "unembed.weight" not in funcrl.load_params(folder)[1]


def test_what_transformers_ignores_is_ignored(tmp_path):
    folder = saved(tmp_path)
    _, params = funcrl.load_params(folder)
    path = folder / "model.safetensors"
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file(load_file(path) | {name: torch.ones(2)}, path, {"format": "pt"})
    assert funcrl.load_params(folder)[1].keys() == params.keys()


def test_a_number_that_does_not_fit_is_refused(tmp_path):
    model, params = funcrl.load_params(saved(tmp_path))
    params["norm.weight"][0] = 1e6
    folder = funcrl.save_params(tmp_path / "large", model, params)
    with pytest.raises(ValueError, match=r"^load_params .*torch.float16 .*larger"):
        funcrl.load_params(folder, torch.float16)
    params["norm.weight"][0] = float("inf")  # which fits
    funcrl.save_params(folder, model, params)
    assert funcrl.load_params(folder, torch.float16)[1]["norm.weight"][0].isinf()


@pytest.mark.parametrize("dtype", ["bfloat16", torch.int64, torch.float8_e4m3fn])
def test_a_dtype_that_is_none_is_refused(tmp_path, dtype):
    with pytest.raises((TypeError, ValueError), match="^load_params expects dtype "):
        funcrl.load_params(tmp_path, dtype)


# --- GGUF -------------------------------------------------------------------------------------

METADATA = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.attn_factor": 2.0,
    "rope.scale_linear": 4.0,
    "attention.sliding_window": 4,
    "attention.causal": False,
    "attention.scale": 0.5,
    "logit_scale": 3.0,
    "expert_count": 4,
    "rope.dimension_count": 2,
}


@pytest.mark.parametrize("name", METADATA)
def test_metadata_of_another_network_are_refused(tmp_path, name):
    path = tmp_path / "model.gguf"
    write_gguf(path, theirs("llama"), "llama", metadata={f"llama.{name}": METADATA[name]})
    with pytest.raises(ValueError, match=f"^load_params .*llama.{name} .*{METADATA[name]}"):
        funcrl.load_params(path)


def test_scaled_rotation_of_llama_3_is_refused(tmp_path):
    """llama.cpp's converter says it by this tensor alone."""
    path = tmp_path / "model.gguf"
    peer = theirs("llama")
    for factors in ([1.0, 1.0], [1.7, 8.0]):
        tensors = {"rope_freqs.weight": numpy.array(factors, dtype=numpy.float32)}
        write_gguf(path, peer, "llama", tensors=tensors)
        if factors == [1.0, 1.0]:
            close(logits(*funcrl.load_params(path)), logits_of(peer))
    with pytest.raises(ValueError, match="^load_params .*rope_freqs.weight"):
        funcrl.load_params(path)


def test_biases_are_in_the_order_of_the_rows_that_they_are_added_to(tmp_path):
    config = LlamaConfig(**SHAPE, tie_word_embeddings=False, attention_bias=True)
    torch.manual_seed(0)
    peer = LlamaForCausalLM(config).eval()
    tensors = {}
    with torch.no_grad():
        for i, layer in enumerate(peer.model.layers):
            for letter in "qkv":
                bias = getattr(layer.self_attn, f"{letter}_proj").bias.normal_()
                by_pairs = bias.view(-1, 2, 2).transpose(1, 2).flatten() if letter in "qk" else bias
                tensors[f"blk.{i}.attn_{letter}.bias"] = by_pairs.numpy()
    plain = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False))
    plain.load_state_dict(peer.state_dict(), strict=False)
    write_gguf(tmp_path / "model.gguf", plain, "llama", tensors=tensors)
    close(logits(*funcrl.load_params(tmp_path / "model.gguf")), logits_of(peer))


def entry(name, kind, value):
    return struct.pack("<Q", len(name)) + name + struct.pack("<I", kind) + value


BYTES = {
    "alignment 0": (entry(b"general.alignment", 4, struct.pack("<I", 0)), "general.alignment .* 0"),
    "alignment text": (entry(b"general.alignment", 8, struct.pack("<Q", 2) + b"ab"),
                       "general.alignment .*'ab'"),
    "architecture list": (entry(b"general.architecture", 9, struct.pack("<IQI", 4, 1, 1)),
                          r"architecture \[1\]"),
    "arrays of arrays": (entry(b"x", 9, struct.pack("<IQ", 9, 1) * 2000), "metadata, .* 9 "),
}  # fmt: skip


@pytest.mark.parametrize("row", BYTES)
def test_odd_metadata_are_one_clear_error(tmp_path, row):
    raw, message = BYTES[row]
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + raw)
    with pytest.raises(ValueError, match=f"^load_params .*{message}"):
        funcrl.load_params(tmp_path / "x.gguf")


@pytest.mark.parametrize(("name", "value"), [("head_count", 0), ("head_count_kv", [2, 2])])
def test_counts_are_counts(tmp_path, name, value, monkeypatch):
    import gguf

    add = {"head_count": "add_head_count", "head_count_kv": "add_head_count_kv"}[name]
    real = getattr(gguf.GGUFWriter, add)
    monkeypatch.setattr(gguf.GGUFWriter, add, lambda self, _: real(self, value))
    write_gguf(tmp_path / "x.gguf", theirs("llama"), "llama")
    with pytest.raises(ValueError, match=f"^load_params .*llama.attention.{name} .*integer"):
        funcrl.load_params(tmp_path / "x.gguf")


def test_a_name_is_there_once(tmp_path):
    (tmp_path / "x.gguf").write_bytes(
        b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * entry(b"a", 4, struct.pack("<I", 0))
    )
    with pytest.raises(ValueError, match="^load_params .*name once"):
        funcrl.load_params(tmp_path / "x.gguf")


def test_rows_are_whole_blocks(tmp_path):
    tensor = struct.pack("<Q", 1) + b"a" + struct.pack("<IQIQ", 1, 33, 8, 0)
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + tensor)
    with pytest.raises(ValueError, match="^load_params .*32 for Q8_0"):
        funcrl.load_params(tmp_path / "x.gguf")


def test_the_data_begin_where_the_alignment_says(tmp_path):
    import gguf

    peer = theirs("llama")
    write_gguf(tmp_path / "a.gguf", peer, "llama")
    real = gguf.GGUFWriter.__init__

    def aligned(self, *args, **kwargs):
        real(self, *args, **kwargs)
        self.add_custom_alignment(256)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "__init__", aligned)
        write_gguf(tmp_path / "b.gguf", peer, "llama")
    one, other = (funcrl.load_params(tmp_path / name)[1] for name in ("a.gguf", "b.gguf"))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_gguf_file_beside_its_config_is_found(tmp_path):
    folder = saved(tmp_path)
    write_gguf(folder / "model.gguf", theirs("llama"), "llama")
    assert weights.find_model(str(folder)) == folder  # safetensors go first
    (folder / "model.safetensors").unlink()
    assert weights.find_model(folder) == folder / "model.gguf"
    assert weights.find_model(tmp_path) == folder / "model.gguf"
    assert funcrl.load_params(folder)
