"""Weights in files: what transformers wrote is read, and what is written transformers reads."""

import json

import numpy
import pytest
import torch
from saved_models import (
    KINDS,
    close,
    logits,
    logits_of,
    rewrite,
    saved,
    theirs,
    write_gguf,
)
from transformers import (
    AutoModelForCausalLM,
)

import funcrl
from funcrl.weights.gguf import STORAGES
from funcrl.weights.tensors import Stored, read_tensor


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shards", ["one file", "many files"])
def test_a_folder_of_transformers_gives_its_logits(tmp_path, kind, shards):
    peer = theirs(kind)
    peer.save_pretrained(tmp_path, max_shard_size="10KB" if shards == "many files" else "5GB")
    assert (tmp_path / "model.safetensors.index.json").exists() == (shards == "many files")
    model, params = funcrl.load_params(tmp_path)
    close(logits(model, params), logits_of(peer))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("most", [10_000, 5_000_000_000])
def test_transformers_reads_what_was_written(tmp_path, kind, most):
    peer = theirs(kind)
    peer.save_pretrained(tmp_path / "theirs")
    model, params = funcrl.load_params(tmp_path / "theirs")
    changed = {name: leaf * 1.25 for name, leaf in params.items()}
    folder = funcrl.save_params(tmp_path / "mine", model, changed, max_shard_bytes=most)
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert type(again) is type(peer)
    close(logits(model, changed), logits_of(again))
    _, back = funcrl.load_params(folder)
    assert back.keys() == changed.keys()
    assert all(torch.equal(back[name], leaf) for name, leaf in changed.items())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_numbers_are_cast_on_the_way(tmp_path, dtype):
    peer = theirs("qwen3").to(dtype)
    peer.save_pretrained(tmp_path)
    _, params = funcrl.load_params(tmp_path)
    assert torch.equal(params["norm.weight"], peer.model.norm.weight.float())
    _, kept = funcrl.load_params(tmp_path, dtype)
    assert torch.equal(kept["embed.weight"], peer.model.embed_tokens.weight)
    model, _ = funcrl.load_params(tmp_path)
    folder = funcrl.save_params(tmp_path / "again", model, kept)
    assert torch.equal(funcrl.load_params(folder, dtype)[1]["embed.weight"], kept["embed.weight"])


def test_a_load_is_whole_whatever_the_slices(tmp_path, monkeypatch):
    theirs("llama").save_pretrained(tmp_path)
    _, whole = funcrl.load_params(tmp_path)
    monkeypatch.setattr("funcrl.weights.tensors._AT_ONCE", 100)
    _, sliced = funcrl.load_params(tmp_path)
    assert all(torch.equal(sliced[name], leaf) for name, leaf in whole.items())


def cut(folder, keep):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])


FAULTS = {
    "no config": (lambda f: (f / "config.json").unlink(), "one model in .*config.json"),
    "broken config": (lambda f: (f / "config.json").write_text("{"), "JSON .*config.json"),
    "another network": (lambda f: rewrite(f, architectures=["SomeoneElses"], model_type="nobody"),
                        "a causal language model in .*nobody"),
    "biases": (lambda f: rewrite(f, attention_bias=True), "missing .*k_proj.bias"),
    "another rotation": (lambda f: rewrite(f, rope_parameters={"rope_type": "yarn"}),
                         "transformers .* loads, got KeyError: .*'yarn'"),
    "no width": (lambda f: rewrite(f, hidden_size=...), "hidden_size .*None"),
    "another width": (lambda f: rewrite(f, intermediate_size=41),
                      r"'model.layers.0.mlp.gate_proj.weight' .*\[41, 24\]"),
    "fewer layers": (lambda f: rewrite(f, num_hidden_layers=1), "1-layer .*'model.layers.1"),
    "more layers": (lambda f: rewrite(f, num_hidden_layers=3), "'model.layers.2"),
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "got no such file"),
    "cut header": (lambda f: cut(f, 100), "of 100 bytes"),
    "cut numbers": (lambda f: cut(f, -10), "whole safetensors"),
    "noise": (lambda f: (f / "model.safetensors").write_bytes(b"\1" * 200), "of 200 bytes"),
    "empty": (lambda f: (f / "model.safetensors").write_bytes(b""), "of 0 bytes"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_folder_is_one_clear_error(tmp_path, fault):
    folder = saved(tmp_path)
    spoil, message = FAULTS[fault]
    spoil(folder)
    with pytest.raises((ValueError, FileNotFoundError), match=f"^load_params .*{message}"):
        funcrl.load_params(folder)


def test_a_missing_shard_is_named(tmp_path):
    theirs("llama").save_pretrained(tmp_path, max_shard_size="10KB")
    (tmp_path / "model-00002-of-00004.safetensors").unlink(missing_ok=True)
    missing = min(set(json.loads((tmp_path / "model.safetensors.index.json").read_text())
                      ["weight_map"].values()))  # fmt: skip
    (tmp_path / missing).unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError, match=f"^load_params .*{missing}"):
        funcrl.load_params(tmp_path)


def test_weights_of_integers_are_refused(tmp_path):
    folder = saved(tmp_path)
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw.replace(b'"F32"', b'"I32"'))
    with pytest.raises(ValueError, match="^load_params .*'I32'"):
        funcrl.load_params(folder)


# --- GGUF -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", ["F32", "F16", "BF16"])
def test_a_gguf_file_gives_the_logits_of_transformers(tmp_path, kind, storage):
    peer = theirs(kind)
    if storage != "F32":
        dtype = {"F16": torch.float16, "BF16": torch.bfloat16}[storage]
        with torch.no_grad():
            for leaf in peer.parameters():
                leaf.copy_(leaf.to(dtype))
    write_gguf(tmp_path / "model.gguf", peer, kind, storage)
    model, params = funcrl.load_params(tmp_path / "model.gguf")
    close(logits(model, params), logits_of(peer))


@pytest.mark.parametrize("number", sorted(STORAGES))
def test_a_storage_type_is_what_the_gguf_package_says(tmp_path, number):
    """On random bytes, so that every bit of a block has been either."""
    import gguf

    storage = STORAGES[number]
    kind = gguf.GGMLQuantizationType(number)
    assert kind.name == storage.name
    generator = numpy.random.default_rng(0)
    rows = generator.integers(0, 256, (64, 3 * storage.block_bytes), dtype=numpy.uint8)
    halves = {"Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
              "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}.get(kind.name, [])  # fmt: skip
    blocks = rows.reshape(-1, storage.block_bytes)
    for at in halves:  # scales that are numbers
        scales = generator.normal(size=len(blocks)).astype(numpy.float16)
        blocks[:, at : at + 2] = scales.view(numpy.uint8).reshape(-1, 2)
    if not halves:  # plain numbers
        rows = generator.normal(size=(64, 3)).astype(numpy.float32)
        rows = gguf.quants.quantize(rows, kind).view(numpy.uint8).reshape(64, -1)
    wanted = gguf.quants.dequantize(rows, kind)
    path = tmp_path / "bytes"
    path.write_bytes(b"abc" + rows.tobytes())
    stored = Stored(path, 3, wanted.shape, storage.block, storage.block_bytes, storage.decode)
    assert torch.equal(read_tensor(stored, torch.float32), torch.from_numpy(wanted.copy()).float())


def gguf_file(tmp_path):
    write_gguf(tmp_path / "model.gguf", theirs("llama"), "llama", "F32")
    return tmp_path / "model.gguf"


GGUF_FAULTS = {
    "another format": (lambda raw: b"GGML" + raw[4:], "begins with b'GGML'"),
    "another version": (lambda raw: raw[:4] + b"\x09" + raw[5:], "version 9"),
    "cut header": (lambda raw: raw[:200], "broken header"),
    "cut numbers": (lambda raw: raw[:-64], "it is cut off"),
    "another network": (lambda raw: raw.replace(b"\0\0llama", b"\0\0gemma", 1),
                        "architecture 'gemma'"),
    "a missing value": (lambda raw: raw.replace(b"llama.block_count", b"llama.block_kount"),
                        "llama.block_count "),
    "a missing tensor": (lambda raw: raw.replace(b"blk.1.ffn_up", b"blk.1.ffn_xx"),
                         "'blk.1.ffn_up.weight'"),
}  # fmt: skip


@pytest.mark.parametrize("fault", GGUF_FAULTS)
def test_a_broken_gguf_file_is_one_clear_error(tmp_path, fault):
    path = gguf_file(tmp_path)
    spoil, message = GGUF_FAULTS[fault]
    path.write_bytes(spoil(path.read_bytes()))
    with pytest.raises(ValueError, match=f"^load_params .*{message}"):
        funcrl.load_params(path)


def test_an_unknown_storage_type_is_refused(tmp_path):
    path = gguf_file(tmp_path)
    raw = bytearray(path.read_bytes())
    at = raw.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8  # dims, one length
    raw[at : at + 4] = (16).to_bytes(4, "little")
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="^load_params .* 16 for 'output_norm.weight'"):
        funcrl.load_params(path)


# --- where weights come from ------------------------------------------------------------------


def test_a_place_that_is_none_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="^load_params .*none, which does not exist"):
        funcrl.load_params(tmp_path / "none")
    (tmp_path / "file.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"^load_params .*file.bin\.$"):
        funcrl.load_params(tmp_path / "file.bin")
