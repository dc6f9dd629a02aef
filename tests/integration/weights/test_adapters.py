"""Adapters as peft has them: written for it, and read from it; the logits are peft's."""

import json
from dataclasses import replace

import peft
import pytest
import torch
import transformers
from cases import run_command, tiny_pretrained, tiny_tokenizer
from safetensors.torch import load_file, save_file

import funcrl
from funcrl.config import (
    EvaluationConfig,
    LoraConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.loop.build import first_params

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


def base_of(folder, kind):
    of_transformers(folder, kind) if kind else tiny_pretrained(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder)


def trained_by_peft(network, folder, **options):
    """Adapters of random numbers in a folder, and the logits of the model that they adapt."""
    options = {"r": 3, "lora_alpha": 7, "target_modules": "all-linear"} | options
    torch.manual_seed(0)
    adapted = peft.get_peft_model(
        network, peft.LoraConfig(init_lora_weights=False, task_type="CAUSAL_LM", **options)
    )
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if weight.requires_grad and "lora" not in name:
                weight += 0.05 * torch.randn_like(weight)
        logits = adapted.eval()(TOKENS).logits
    adapted.save_pretrained(folder)
    return logits


def logits_of(model, params):
    positions = torch.arange(TOKENS.shape[1])
    rows = [funcrl.types.Sample(tokens, positions) for tokens in TOKENS]
    return torch.stack([funcrl.models.logits_fn(model)(params, row) for row in rows])


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
@pytest.mark.filterwarnings("ignore:.*did not match any targeted module:RuntimeWarning")
@pytest.mark.parametrize("kind", [None, *OF_TRANSFORMERS])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True},
        {"rank_pattern": {"q_proj": 5, "c_proj": 5, "dense": 5}},
        {"bias": "all"},
        {"modules_to_save": ["norm", "ln_f"]},
    ],
)
def test_those_of_peft_are_merged_into_their_base(kind, options, tmp_path):
    wanted = trained_by_peft(base_of(tmp_path / "base", kind), tmp_path / "adapters", **options)
    model, params = funcrl.load_params(tmp_path / "adapters")
    found = logits_of(model, params)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    before = logits_of(*funcrl.load_params(tmp_path / "base"))
    assert (before - wanted).abs().max() > 0.1 * wanted.abs().max()


@pytest.mark.filterwarnings("ignore:fan_in_fan_out is set:UserWarning")
@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")
@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (None, {"use_dora": True}, "plain low-rank .* got use_dora; peft's merge_and_unload"),
        (None, {"alpha_pattern": {"q_proj": 2}}, "got alpha_pattern"),
        (None, {"modules_to_save": ["lm_head"]}, "got 'lm_head.weight'"),
        (None, {"trainable_token_indices": [1, 2]}, "got 'model.embed_tokens.token_adapter"),
        (None, {"modules_to_save": ["embed_tokens"]}, "as its head too, got another"),
        ("GPT2LMHeadModel", {"modules_to_save": ["wte"]}, "'transformer.wte.weight' .* as its hea"),
    ],
)
def test_those_of_peft_that_are_more_than_low_rank_are_named(kind, options, named, tmp_path):
    trained_by_peft(base_of(tmp_path / "base", kind), tmp_path / "adapters", **options)
    with pytest.raises(ValueError, match=f"^load_params expects .*{named}"):
        funcrl.load_params(tmp_path / "adapters")


def test_broken_adapters_are_named(tmp_path):
    adapters = tmp_path / "adapters"
    trained_by_peft(base_of(tmp_path / "base", None), adapters)
    tensors = load_file(adapters / "adapter_model.safetensors")
    first = next(name for name in tensors if "q_proj.lora_B" in name)
    described = json.loads((adapters / "adapter_config.json").read_text())

    def refused(named, change=None, **changes):
        save_file({**tensors, **(change or {})}, adapters / "adapter_model.safetensors")
        (adapters / "adapter_config.json").write_text(json.dumps(described | changes))
        with pytest.raises(ValueError, match=f"^load_params expects .*{named}"):
            funcrl.load_params(adapters)

    refused("got 'IA3'", peft_type="IA3")
    refused("got init_lora_weights 'pissa'", init_lora_weights="pissa")
    refused("got None", base_model_name_or_path=None)
    refused("'no-such-place': find expects", base_model_name_or_path="no-such-place")
    refused("to name a whole model", base_model_name_or_path=str(adapters))
    refused("a number as lora_alpha", lora_alpha="7")
    refused(
        r"lora_B \[out, rank\] of 'model.layers.0.self_attn.q_proj'", {first: torch.zeros(4, 2)}
    )
    refused(r"'model.layers.0.self_attn.q_proj.weight' of shape", {first: torch.zeros(4, 3)})
    refused("got 'model.layers.9.mlp.up_proj.weight'", {
        f"base_model.model.model.layers.9.mlp.up_proj.lora_{part}.weight": torch.zeros(3, 3)
        for part in "AB"
    })  # fmt: skip
    (adapters / "adapter_model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="adapter_model.safetensors, got no such file"):
        funcrl.load_params(adapters)


def test_names_of_a_text_model_within_a_larger_one_are_read(tmp_path):
    adapters = tmp_path / "adapters"
    wanted = trained_by_peft(base_of(tmp_path / "base", None), adapters)
    tensors = load_file(adapters / "adapter_model.safetensors")
    outer = {
        name.replace("model.layers", "model.language_model.layers"): leaf
        for name, leaf in tensors.items()
    }
    assert outer.keys().isdisjoint(tensors)
    save_file(outer, adapters / "adapter_model.safetensors")
    found = logits_of(*funcrl.load_params(adapters))
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_run_begins_from_them(tmp_path, capsys):
    """As the only model in a folder; their tokenizer, and what ends a text, are the base's."""
    base, adapters = tmp_path / "base", tmp_path / "sft" / "checkpoint-9"
    trained_by_peft(base_of(base, None), adapters)
    (base / "generation_config.json").write_text('{"eos_token_id": [0, 3]}')
    wanted = funcrl.tasks.load_tokenizer(base)
    for _ in range(2):
        found = funcrl.tasks.load_tokenizer(adapters)
        assert (found.ends, found.files()) == (wanted.ends, wanted.files())
        tiny_tokenizer()._tokenizer.save_pretrained(adapters)
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    config = replace(CONFIG, model=str(tmp_path / "sft"), task=str(rows), lora=LoraConfig())
    parts = funcrl.build(config)
    params = funcrl.load_params(adapters)[1]
    assert all(leaf.equal(params[name]) for name, leaf in first_params(parts).items())
    line = [
        "train", "--model", tmp_path / "sft", "--task", rows, "--steps", "1", "--num-prompts", "2",
        "--num-generations", "2", "--sampling.max-tokens", "4", "--evaluation.every", "0",
        "--lora.rank", "2", "--run-dir", tmp_path / "run",
    ]  # fmt: skip
    for args in (line, ["export", tmp_path / "run", "--out", tmp_path / "whole"]):
        ended = run_command(args, capsys)
        assert ended.code == 0, ended.err
    assert funcrl.tasks.load_tokenizer(tmp_path / "whole").ends == wanted.ends
    assert funcrl.load_params(tmp_path / "whole")[1].keys() == params.keys()
    with pytest.raises(ValueError, match="^export expects a run that trains adapters of a Hugging"):
        funcrl.export(tmp_path / "run", tmp_path / "more", adapters=True)
