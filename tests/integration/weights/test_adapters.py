"""Adapters as peft has them: loaded onto the base by peft itself, the logits are the run's."""

import json
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from cases import run_command, tiny_pretrained, tiny_tokenizer
from safetensors.torch import load_file

import funcrl
from funcrl.config import (
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)

TOKENS = torch.randint(0, 200, (2, 12), generator=torch.Generator().manual_seed(0))
CONFIG = TrainConfig(
    task="countdown", steps=2, num_prompts=2, num_generations=4,
    warm_start=WarmStartConfig(steps=0), optimizer=OptimizerConfig(learning_rate=3e-2),
    sampling=Sampling(max_tokens=6), evaluation=EvaluationConfig(every=0),
    lora=LoraConfig(rank=3, alpha=5.0),
)  # fmt: skip


def varied(completion):
    return float(len(set(completion)))


# Falcon's linear layers are of a class of its own.
OF_TRANSFORMERS = {
    "GPT2LMHeadModel": {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "FalconForCausalLM": {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2},
}


def of_transformers(folder, kind):
    tokenizer, network = tiny_tokenizer(), getattr(transformers, kind)
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    sizes = OF_TRANSFORMERS[kind] | {"vocab_size": tokenizer.vocab_size}
    network(network.config_class(**sizes, **ends)).save_pretrained(folder)
    tokenizer._tokenizer.save_pretrained(folder)


@pytest.fixture(params=[None, *OF_TRANSFORMERS])
def run(request, tmp_path):
    folder = tmp_path / "base"
    of_transformers(folder, request.param) if request.param else tiny_pretrained(folder)
    config = replace(CONFIG, model=str(folder), run_dir=tmp_path / "run")
    rows = [{"prompt": text} for text in "abcdef"]
    tokenizer = funcrl.tasks.load_tokenizer(folder)
    trained = funcrl.train(
        config, task=funcrl.tasks.from_rows(rows, varied, tokenizer=tokenizer, held_out=0.0)
    )
    assert any(leaf.any() for name, leaf in trained.state.params.items() if "up" in name)
    return tmp_path


def test_peft_loads_them_onto_the_base(run, capsys):
    ended = run_command(["export", run / "run", "--out", run / "adapters", "--adapters"], capsys)
    assert ended.code == 0, ended.err
    assert sorted(each.name for each in (run / "adapters").iterdir()) == [
        "adapter_config.json", "adapter_model.safetensors",
    ]  # fmt: skip
    described = json.loads((run / "adapters" / "adapter_config.json").read_text())
    base = described["base_model_name_or_path"]
    plain = transformers.AutoModelForCausalLM.from_pretrained(base).eval()
    with torch.no_grad():
        before = plain(TOKENS).logits
        theirs = peft.PeftModel.from_pretrained(plain, run / "adapters").eval()
        found = theirs(TOKENS).logits
    whole = funcrl.export(run / "run", run / "whole", note=lambda line: None)
    merged = transformers.AutoModelForCausalLM.from_pretrained(whole).eval()
    with torch.no_grad():
        wanted = merged(TOKENS).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    assert (before - wanted).abs().max() > 1e-3 * wanted.abs().max()
    tensors = load_file(run / "adapters" / "adapter_model.safetensors")
    layers = {name.rsplit(".", 3)[1] for name in tensors}
    assert layers in (
        {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
        {"c_attn", "c_proj", "c_fc"},
        {"query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"},
    )
    assert {3} == {leaf.shape[0] for name, leaf in tensors.items() if "lora_A" in name}
    # Adapters may be written over, a model not.
    funcrl.export(run / "run", run / "adapters", adapters=True)
    with pytest.raises(ValueError, match="^export expects --out with --adapters to be a new"):
        funcrl.export(run / "run", run / "whole", adapters=True)


def test_what_has_no_adapters_for_peft_is_refused(tmp_path):
    plain = replace(CONFIG, task="sum_digits", lora=LoraConfig(), run_dir=tmp_path / "plain")
    funcrl.train(plain)
    with pytest.raises(ValueError, match="one that trains all parameters"):
        funcrl.export(tmp_path / "plain", tmp_path / "out", adapters=True)
    funcrl.train(replace(plain, lora=LoraConfig(rank=2), run_dir=tmp_path / "micro"))
    with pytest.raises(ValueError, match="adapters of a Hugging Face folder .* one of micro"):
        funcrl.export(tmp_path / "micro", tmp_path / "out", adapters=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("name", ["embed.weight", "blocks.0.attention.q.weight"])
def test_layers_that_peft_does_not_have_are_named(tmp_path, name):
    from funcrl.weights.adapters import save_adapters

    config = funcrl.models.TransformerConfig(attention_gate=True)
    adapters = {f"{name}.lora_down": torch.zeros(2, 3), f"{name}.lora_up": torch.zeros(3, 2)}
    with pytest.raises(ValueError, match=f"^export expects adapters of whole .*{name}"):
        save_adapters(tmp_path / "x", funcrl.models.Transformer(config), adapters, 1.0, "base")
