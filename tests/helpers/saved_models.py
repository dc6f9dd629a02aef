"""Small models of transformers in files, and what they compute."""

import json

import numpy
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import funcrl
from funcrl import weights

SHAPE = {
    "vocab_size": 48, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 2, "intermediate_size": 40, "max_position_embeddings": 64,
    "rope_theta": 5000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip


KINDS = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 8, "tie_word_embeddings": False}),
}


TOKENS = torch.randint(0, 48, (40,), generator=torch.Generator().manual_seed(0))


def theirs(kind):
    network, config, options = KINDS[kind]
    torch.manual_seed(0)
    peer = network(config(**SHAPE, **options)).eval()
    with torch.no_grad():
        for leaf in peer.parameters():  # norms and biases too, so that none is 1 or 0
            leaf.copy_(torch.randn_like(leaf) * 0.3 + (leaf.ndim == 1))
    return peer


def logits_of(peer):
    with torch.no_grad():
        return peer(TOKENS[None]).logits[0]


def logits(model, params):
    return funcrl.functional(model)(params, TOKENS, torch.arange(len(TOKENS)))


def close(mine, wanted, bound=1e-5):
    assert (mine - wanted).abs().max() <= bound * wanted.abs().max()


def saved(tmp_path):
    folder = tmp_path / "model"
    theirs("llama").save_pretrained(folder)
    return folder


def rewrite(folder, **changes):
    path = folder / "config.json"
    values = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: each for name, each in values.items() if each is not ...}))


def write_gguf(path, peer, kind, storage="F32", metadata=None, tensors=None):
    """A file as llama.cpp's converter makes it, by the `gguf` package; with more, if given."""
    import gguf

    name = kind.split("-")[0]
    writer = gguf.GGUFWriter(path, name)
    c = peer.config
    writer.add_block_count(c.num_hidden_layers)
    writer.add_context_length(c.max_position_embeddings)
    writer.add_embedding_length(c.hidden_size)
    writer.add_feed_forward_length(c.intermediate_size)
    writer.add_head_count(c.num_attention_heads)
    writer.add_head_count_kv(c.num_key_value_heads)
    writer.add_layer_norm_rms_eps(c.rms_norm_eps)
    writer.add_rope_freq_base(SHAPE["rope_theta"])
    if name == "qwen3":
        writer.add_key_length(c.head_dim)
        writer.add_value_length(c.head_dim)
    described = c.to_dict() | {"architectures": [type(peer).__name__]}
    model = funcrl.models.Transformer(weights.from_hugging_face(described, ""))
    names = [weights.translate(ours) for ours, _ in model.named_parameters()]
    for key, leaf in peer.state_dict().items():
        if key == "lm_head.weight" and c.tie_word_embeddings:
            continue
        array = leaf.float().numpy()
        if name == "llama" and ("q_proj" in key or "k_proj" in key):
            heads = c.num_attention_heads if "q_proj" in key else c.num_key_value_heads
            split = array.reshape(heads, 2, array.shape[0] // heads // 2, array.shape[1])
            array = split.swapaxes(1, 2).reshape(array.shape)
        kind_ = getattr(gguf.GGMLQuantizationType, storage)
        if array.ndim == 1:
            kind_ = gguf.GGMLQuantizationType.F32
        packed = gguf.quants.quantize(numpy.ascontiguousarray(array), kind_)
        there = next(each.gguf for each in names if each.hugging_face == key)
        writer.add_tensor(there, packed, raw_dtype=kind_)
    for key, value in (metadata or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
               str: writer.add_string, list: writer.add_array}[type(value)]  # fmt: skip
        add(key, value)
    for key, value in (tensors or {}).items():
        writer.add_tensor(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
