"""Small files of weights that ask for much time or memory: each is one clear error, at once."""

import json
import os
import struct

import pytest
import torch
from bounded import bounded

import funcrl
from funcrl import weights
from funcrl.weights.gguf import read_gguf

# torch imports a second's worth at the first of these, which no case should pay.
funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))

U32, U64, F32, TEXT, LIST = 4, 10, 6, 8, 9
CODES = {0: "B", U32: "I", U64: "Q", F32: "f"}
SHAPE = {
    "block_count": (U32, 2), "context_length": (U32, 64), "embedding_length": (U32, 8),
    "feed_forward_length": (U32, 16), "attention.head_count": (U32, 2),
    "attention.layer_norm_rms_epsilon": (F32, 1e-5),
}  # fmt: skip
LAYER = {
    "attn_norm": (8,), "attn_q": (8, 8), "attn_k": (8, 8), "attn_v": (8, 8), "attn_output": (8, 8),
    "ffn_norm": (8,), "ffn_gate": (16, 8), "ffn_up": (16, 8), "ffn_down": (8, 16),
}  # fmt: skip


def text(raw):
    raw = raw.encode() if isinstance(raw, str) else raw
    return struct.pack("<Q", len(raw)) + raw


def value(kind, each):
    if kind == TEXT:
        return text(each)
    return each if kind == LIST else struct.pack(f"<{CODES[kind]}", each)


def tensors(num_layers=2):
    """The names, shapes and offsets of a small model's tensors, end to end."""
    found, offset = {}, 0
    shapes = {"token_embd.weight": (11, 8), "output_norm.weight": (8,)}
    for index in range(num_layers):
        shapes |= {f"blk.{index}.{name}.weight": shape for name, shape in LAYER.items()}
    for name, shape in shapes.items():
        found[name] = shape, offset
        offset += -(-4 * torch.Size(shape).numel() // 32) * 32
    return found, offset


def gguf(path, changed=(), shapes=(), extra=b"", num_extra=0, num_tensors=None):
    """Write a small model with some of its metadata and tensors changed; `extra` are metadata."""
    described = {f"llama.{name}": each for name, each in (SHAPE | dict(changed)).items()}
    described["general.architecture"] = TEXT, "llama"
    placed, size = tensors()
    placed |= dict(shapes)
    raw = b"".join(text(name) + struct.pack("<I", kind) + value(kind, each)
                   for name, (kind, each) in described.items()) + extra  # fmt: skip
    for name, (shape, offset) in placed.items():
        raw += text(name) + struct.pack("<I", len(shape))
        raw += b"".join(struct.pack("<Q", each) for each in shape[::-1])
        raw += struct.pack("<IQ", 0, offset)
    count = len(placed) if num_tensors is None else num_tensors
    raw = b"GGUF" + struct.pack("<IQQ", 3, count, len(described) + num_extra) + raw
    path.write_bytes(raw + bytes(-len(raw) % 32) + bytes(size))
    return path


def entry(name, kind, raw):
    return {"extra": text(name) + struct.pack("<I", kind) + raw, "num_extra": 1}


def array(inner, count, raw=b""):
    return entry("x", LIST, struct.pack("<IQ", inner, count) + raw)


# What is changed in a small GGUF file, and what the error says.
GGUF = {
    **{f"{count} layers": ({"changed": {"block_count": (U64, count)}}, wanted)
       for count, wanted in ((3, "3 layers"), (4_000, "4000 layers"), (200_000, "block_count"),
                             (10**9, "block_count"), (2**62, "block_count"))},
    **{f"{name} {count}": ({"changed": {name: (U64, count)}}, name)
       for name in ("embedding_length", "feed_forward_length", "context_length",
                    "attention.head_count", "attention.head_count_kv", "attention.key_length")
       for count in (10**9 + 2, 2**62)},
    "a list as a size": ({"changed": {"embedding_length": (LIST, struct.pack("<IQ", 0, 10**6)
                                                           + bytes(10**6))}}, "embedding_length"),
    "200,000 dimensions": ({"shapes": {"x": ((2**62,) * 200_000, 0)}}, "5 dimensions"),
    "6 dimensions": ({"shapes": {"x": ((1,) * 6, 0)}}, "5 dimensions"),
    "no numbers": ({"shapes": {"rope_freqs.weight": ((0, 2**63), 0)}}, "rope_freqs.weight"),
    "a huge tensor": ({"shapes": {"token_embd.weight": ((2**40, 2**40), 0)}}, "it is cut off"),
    "a far tensor": ({"shapes": {"token_embd.weight": ((11, 8), 2**63)}}, "it is cut off"),
    "overlapping tensors": ({"shapes": {"output_norm.weight": ((8,), 0)}}, "output_norm.weight"),
    "2^62 tensors": ({"num_tensors": 2**62}, "tensors"),
    "2^62 metadata": ({"num_extra": 2**62}, "metadata"),
    "a text of 2^62": (entry("x", TEXT, struct.pack("<Q", 2**62)), "cut off"),
    "a text of 2^31": (entry("x", TEXT, struct.pack("<Q", 2**31 - 1)), "cut off"),
    "2^62 bytes": (array(0, 2**62), "cut off"),
    "2^33 bytes": (array(0, 2**33), "cut off"),
    "2^62 doubles": (array(12, 2**62), "cut off"),
    "2^62 texts": (array(TEXT, 2**62), "cut off"),
    "arrays in arrays": (array(LIST, 2**40, struct.pack("<IQ", 9, 2**40) * 3000), "arrays of 9"),
    "not UTF-8": (entry("x", TEXT, text(b"\xff\xfe")), "broken header"),
    "an alignment of 2^62": (entry("general.alignment", U64, struct.pack("<Q", 2**62)),
                             "general.alignment"),
}  # fmt: skip


@pytest.mark.parametrize("row", GGUF)
def test_a_small_gguf_file_asks_for_little(tmp_path, row):
    changes, message = GGUF[row]
    path = gguf(tmp_path / "model.gguf", **changes)
    with bounded(2.0), pytest.raises(ValueError, match=f"(?s)^load_params .*{message}") as caught:
        weights.load_config(path)
    assert "model.gguf" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_the_small_gguf_file_is_whole_otherwise(tmp_path):
    model, params = funcrl.load_params(gguf(tmp_path / "model.gguf"))
    assert (model.config.num_layers, model.config.vocab_size, len(params)) == (2, 11, 20)


def test_numbers_of_the_metadata_take_the_memory_that_they_take_in_the_file(tmp_path):
    """Twenty million numbers as Python's would be 160 MB and more."""
    count = 5_000_000
    path = gguf(tmp_path / "model.gguf", **array(U32, count, b"\xff\xfe\xfd\xfc" * count))
    with bounded(5.0, more_bytes=100_000_000):
        assert len(read_gguf(path).metadata["x"]) == count


def test_metadata_are_of_a_size_that_tokenizers_have(tmp_path):
    path = gguf(tmp_path / "model.gguf")
    raw = path.read_bytes()
    head = raw[:24] + text("x") + struct.pack("<IQ", TEXT, 1 << 27)
    with path.open("wb") as file:
        file.write(head)
        file.truncate(len(head) + (1 << 27))  # a file with a hole, which takes no room
    with bounded(2.0, 1 << 26), pytest.raises(ValueError, match=r"^load_params .*model.gguf"):
        weights.load_config(path)


def folder(tmp_path, **changes):
    """A small model in a Hugging Face folder, its config.json changed."""
    shape = funcrl.models.TransformerConfig(
        vocab_size=11, width=8, num_layers=2, num_heads=2, num_kv_heads=2, head_width=4,
        mlp_width=16, qk_norm=False,
    )  # fmt: skip
    model = funcrl.models.Transformer(shape)
    made = funcrl.save_params(tmp_path / "model", model, funcrl.init_params(model, seed=0))
    described = json.loads((made / "config.json").read_text()) | changes
    (made / "config.json").write_text(json.dumps(described))
    return made


FIELDS = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",
          "num_key_value_heads", "head_dim", "intermediate_size",
          "max_position_embeddings")  # fmt: skip


@pytest.mark.parametrize("count", [10**9, 10**18, 2**80, 10**400])
@pytest.mark.parametrize("field", FIELDS)
def test_a_size_beyond_any_model_is_refused_by_its_name(tmp_path, field, count):
    path = folder(tmp_path)
    raw = json.loads((path / "config.json").read_text())
    written = json.dumps(raw | {field: "HERE"}).replace('"HERE"', "1" + "0" * 400)
    (path / "config.json").write_text(
        written if count == 10**400 else json.dumps(raw | {field: count})
    )
    wanted = "config.json" if count > 10**20 else f"{field} .*config.json"
    with bounded(2.0), pytest.raises(ValueError, match=f"^load_params expects .*{wanted}"):
        weights.load_config(path)


@pytest.mark.parametrize(("field", "count"), [
    ("num_hidden_layers", 4000), ("num_hidden_layers", 1), ("vocab_size", 10**7),
    ("hidden_size", 16384), ("intermediate_size", 10**6), ("num_attention_heads", 1024),
])  # fmt: skip
def test_a_size_that_the_tensors_do_not_have_is_refused_at_once(tmp_path, field, count):
    path = folder(tmp_path, **{field: count})
    with bounded(1.0), pytest.raises(ValueError, match=r"^load_params expects .*model"):
        weights.load_config(path)


def with_header(path, header, data=b""):
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def one(shape, begin, end):
    return {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}


HEADERS = {
    "6 dimensions": ({"x": one([1] * 6, 0, 4)}, b"1234", "5 dimensions"),
    "200,000 dimensions": ({"x": one([2**62] * 200_000, 0, 4)}, b"1234", "whole safetensors"),
    "a huge shape": ({"x": one([2**62, 2**62], 0, 4)}, b"1234", "whole safetensors"),
    "a shape of 400 digits": (b'{"x": {"dtype": "F32", "shape": [1' + b"0" * 400
                              + b'], "data_offsets": [0, 4]}}', b"1234", "whole safetensors"),
    "a shape of 10,000 digits": (b'{"x": {"dtype": "F32", "shape": [1' + b"0" * 10_000
                                 + b'], "data_offsets": [0, 4]}}', b"1234", "whole safetensors"),
    "overlapping": ({"x": one([1], 0, 4), "y": one([1], 0, 4)}, b"1234", "whole safetensors"),
    "twice": (b'{"x": 1, "x": 1}', b"", "whole safetensors"),
    "deep": (b"[" * 200_000, b"", "whole safetensors"),
    "deep and whole": (b'{"__metadata__": ' + b"[" * 900 + b"]" * 900 + b"}", b"", "model"),
    "a dtype that is a list": ({"x": one([1], 0, 4) | {"dtype": []}}, b"1234", "whole safetensors"),
    "a text as an entry": ({"x": "y" * 10_000}, b"", "whole safetensors"),
    "a long name": ({"x" * 10_000_000: one([1], 0, 8)}, b"1234", "model.safetensors"),
    "not UTF-8": (b'{"\xff": 1}', b"", "whole safetensors"),
}  # fmt: skip


@pytest.mark.parametrize("row", HEADERS)
def test_a_small_safetensors_file_asks_for_little(tmp_path, row):
    header, data, message = HEADERS[row]
    path = folder(tmp_path)
    with_header(path, header, data)
    with bounded(2.0), pytest.raises(ValueError, match=f"(?s)^load_params .*{message}") as caught:
        weights.load_config(path)
    assert len(str(caught.value)) < 1000


def test_a_header_of_safetensors_is_of_a_size_that_models_have(tmp_path):
    path = folder(tmp_path)
    with (path / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", 90_000_000) + b'{"x":{')
        file.truncate(100_000_000)
    with bounded(1.0, 1 << 26), pytest.raises(ValueError, match=r"^load_params .*90000000 bytes"):
        weights.load_config(path)


@pytest.mark.parametrize("length", [2**60, 2**64 - 1])
def test_a_header_is_no_longer_than_its_file(tmp_path, length):
    path = folder(tmp_path)
    (path / "model.safetensors").write_bytes(struct.pack("<Q", length) + bytes(100))
    with bounded(1.0), pytest.raises(ValueError, match=r"^load_params .*model.safetensors"):
        weights.load_config(path)


INDICES = {
    "deep": "[" * 200_000,
    "a list": "[1]",
    "texts": '{"weight_map": "x"}',
    "a long number": '{"weight_map": 1' + "0" * 5000 + "}",
    "itself": '{"weight_map": {"x": "model.safetensors.index.json"}}',
    "nothing": '{"weight_map": {}}',
    "not UTF-8": b"\xff",
    "a thing of 10 MB": json.dumps({"weight_map": {"x": ["y" * 10_000_000]}}),
}


@pytest.mark.parametrize("row", INDICES)
def test_an_odd_index_is_one_clear_error(tmp_path, row):
    path = folder(tmp_path)
    (path / "model.safetensors").unlink()
    raw = INDICES[row]
    (path / "model.safetensors.index.json").write_bytes(
        raw if isinstance(raw, bytes) else raw.encode()
    )
    with bounded(2.0), pytest.raises(ValueError, match=r"^load_params ") as caught:
        weights.load_config(path)
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "x.index.json", "m.gguf"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["a pipe", "a folder"])
def test_what_is_no_file_is_refused(tmp_path, name, make):
    path = folder(tmp_path)
    if name == "x.index.json":
        (path / "model.safetensors").unlink()
        name = "model.safetensors.index.json"
    (path / name).unlink(missing_ok=True)
    make(path / name)
    target = path / name if name == "m.gguf" else path
    with bounded(2.0), pytest.raises((OSError, ValueError), match=r"^load_params expects "):
        weights.load_config(target)


LARGE = {
    "100 layers": {"num_layers": 100},
    "a large vocabulary": {"vocab_size": 262_144},
    "wide": {"width": 16_384, "num_heads": 128, "num_kv_heads": 8, "head_width": 128,
             "mlp_width": 53_248, "num_layers": 126},
    "a long context": {"context_length": 10_485_760},
}  # fmt: skip


@pytest.mark.parametrize("row", LARGE)
def test_the_largest_models_that_there_are_have_a_shape(row):
    config = funcrl.models.TransformerConfig(**LARGE[row])
    described = weights.to_hugging_face(config, "float32")
    assert weights.from_hugging_face(described, "config.json") == config
    assert funcrl.models.Transformer(config).config == config


@pytest.mark.slow
def test_a_deep_model_is_saved_and_loaded(tmp_path):
    shape = funcrl.models.TransformerConfig(
        vocab_size=11, width=4, num_layers=100, num_heads=1, num_kv_heads=1, head_width=4,
        mlp_width=4, qk_norm=False,
    )  # fmt: skip
    model = funcrl.models.Transformer(shape)
    params = funcrl.init_params(model, seed=0)
    for path in (tmp_path / "model", tmp_path / "model.gguf"):
        again, loaded = funcrl.load_params(funcrl.save_params(path, model, params))
        assert again.config.num_layers == 100
        assert loaded.keys() == params.keys()
