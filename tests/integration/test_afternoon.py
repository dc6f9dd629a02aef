"""An afternoon of a user of TRL: their folders, data, reward and optimizer, and what they type."""

import json
import subprocess
import sys

import datasets
import openai
import peft
import pytest
import torch
import transformers
from cases import TEMPLATES, run_command, tiny_tokenizer

import funcrl
from funcrl.config import (
    EvaluationConfig,
    LoraConfig,
    Sampling,
    ServeConfig,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.serve.serve import serving

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
MODELS = {
    "mistral": (transformers.MistralForCausalLM, SIZES | {"sliding_window": 16}),
    "llama3": (transformers.LlamaForCausalLM, SIZES | {"rope_parameters": LLAMA3}),
    "gpt2": (transformers.GPT2LMHeadModel, {
        "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 0,
        "eos_token_id": 0}),
}  # fmt: skip
ROWS = datasets.Dataset.from_list(
    [{"prompt": [{"role": "user", "content": f"{a}+{b}?"}], "sum": a + b}
     for a in range(6) for b in range(6)]
)  # fmt: skip


def variety(prompts, completions, sum, **kwargs):
    """In the form of TRL, on conversations: more kinds of characters are better."""
    assert {prompt[0]["role"] for prompt in prompts} == {"user"}
    assert len(sum) == len(completions)
    return [len(set(completion[0]["content"])) / 10 for completion in completions]


def folder_of(place, name):
    tokenizer = tiny_tokenizer(TEMPLATES["chatml"])
    network, options = MODELS[name]
    torch.manual_seed(0)
    network(network.config_class(vocab_size=tokenizer.vocab_size, **options)).save_pretrained(place)
    tokenizer._tokenizer.save_pretrained(place)
    return place


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_what_a_user_of_trl_does_on_the_first_day(tmp_path, name, capsys):
    folder = folder_of(tmp_path / name, name)
    optimizer = funcrl.optim.from_torch(
        lambda params: torch.optim.NAdam(params, lr=1e-2),
        lambda each: transformers.get_cosine_schedule_with_warmup(each, 1, 3),
    )
    task = funcrl.tasks.from_rows(
        ROWS, variety, tokenizer=funcrl.tasks.load_tokenizer(folder), held_out=0.2
    )
    config = TrainConfig(
        model=str(folder), run_dir=tmp_path / "run", steps=3, num_prompts=4, num_generations=4,
        sampling=Sampling(max_tokens=8), warm_start=WarmStartConfig(steps=0),
        evaluation=EvaluationConfig(every=3, num_prompts=4), lora=LoraConfig(
            rank=2, targets=(".attention.", ".attn.c_attn.")),
    )  # fmt: skip
    trained = funcrl.train(config, task=task, optimizer=optimizer)
    rates = [row["learning_rate"] for row in trained.history[1:]]
    assert rates == pytest.approx([0.0, 1e-2, 5e-3])
    run = tmp_path / "run"
    # Export, whole and as adapters for peft.
    out = funcrl.export(run, tmp_path / "out", task=task)
    adapters = funcrl.export(run, tmp_path / "adapters", adapters=True)
    base = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    merged = transformers.AutoModelForCausalLM.from_pretrained(out).eval()
    tokens = torch.arange(1, 20)[None]
    with torch.no_grad():
        wanted = merged(tokens).logits
        found = peft.PeftModel.from_pretrained(base, adapters).eval()(tokens).logits
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    # Generate, chat and serve the export: the same answer each time.
    asked = ["--max-tokens", "6", "--temperature", "0"]
    generated = run_command(["generate", "--model", out, *asked, "1+1?"], capsys)
    assert generated.code == 0, generated.err
    piped = subprocess.run(
        [sys.executable, "-m", "funcrl", "chat", str(out), *asked], input="1+1?\n",
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert piped.stdout == generated.out
    options = ServeConfig(model=str(out), port=0, key="k", folder=tmp_path / "served")
    with (
        serving(options, lambda line: None) as address,
        openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as client,
    ):
        events = client.chat.completions.create(
            model=str(out), messages=[{"role": "user", "content": "1+1?"}], max_tokens=6,
            temperature=0, stream=True,
        )  # fmt: skip
        text = "".join(event.choices[0].delta.content or "" for event in events)
    assert funcrl.core.printing.printable(f"{text}\n") == generated.out


@pytest.mark.slow
def test_three_seeds_of_a_file_and_their_page(tmp_path, capsys):
    folder = folder_of(tmp_path / "gpt2", "gpt2")
    data = tmp_path / "sums.json"
    data.write_text(json.dumps([{"question": f"{a}+1=", "result": a + 1} for a in range(20)]))
    line = [
        "train", "--model", folder, "--task", data, "--prompt-column", "question",
        "--answer-column", "result", "--seeds", "0", "1", "2", "--max-steps", "2", "--lr", "1e-3",
        "--batch-size", "4", "--max-completion-length", "4", "--use-peft", "--lora-rank", "2",
        "--lora.targets", ".attn.", "--no-drop-zero-variance", "--output-dir", tmp_path / "seeds",
        "--evaluation.num-prompts", "2",
    ]  # fmt: skip
    ended = run_command(line, capsys)
    assert ended.code == 0, ended.err
    assert "of 3 seeds: " in ended.out
    assert (tmp_path / "seeds" / "report.html").exists()
    assert "--lr is --optimizer.learning-rate" in ended.err
