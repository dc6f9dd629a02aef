"""What leaves a run is whole: transformers reads the model, its tokenizer and where it ends."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cases import run_command, tiny_pretrained

import funcrl
from funcrl import runs
from funcrl.config import EvaluationConfig, OptimizerConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.generators import sample
from funcrl.tasks import ByteTokenizer, CharTokenizer, SumDigits
from funcrl.tasks.tokenizers import tokenizer_files

transformers = pytest.importorskip("transformers")
# With the characters of the end token's usual name, and some that other libraries strip or join.
ALPHABET = "ab <|end>\n\t+=0é漢😀\u200d\u0301"


def as_transformers_reads(tokenizer, folder):
    for name, content in tokenizer_files(tokenizer).items():
        (folder / name).write_bytes(content)
    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    "own", [CharTokenizer(ALPHABET), ByteTokenizer()], ids=["characters", "bytes"]
)
def test_a_tokenizer_is_the_same_in_transformers(tmp_path, own):
    other = as_transformers_reads(own, tmp_path)
    assert (len(other), other.eos_token_id) == (own.vocab_size, own.end)
    texts = [*ALPHABET, ALPHABET, "", "  ", "<|end|>", "\n\n a", ALPHABET[::-1] * 3]
    for text in texts:
        tokens = own.encode(text)
        assert other(text)["input_ids"] == tokens
        assert other.decode([*tokens, own.end]) == text
    drawn = torch.randint(own.vocab_size, (300, 5), generator=torch.Generator().manual_seed(0))
    for tokens in drawn.tolist():
        assert other.decode(tokens) == own.decode(tokens)


def test_an_unknown_character_is_an_error_in_transformers_too(tmp_path):
    other = as_transformers_reads(CharTokenizer(ALPHABET), tmp_path)
    with pytest.raises(Exception, match="WordLevel error"):
        other("aZb")


def tiny(folder, **options):
    return TrainConfig(run_dir=folder, steps=1, num_prompts=2, num_generations=2, threads=1,
                       warm_start=WarmStartConfig(steps=20, every=20, accuracy=1.0, num_prompts=16),
                       evaluation=EvaluationConfig(every=0, num_prompts=2), **options)  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    funcrl.train(tiny(folder))
    return folder


@pytest.mark.slow
def test_what_transformers_generates_ends_where_the_sampler_does(run, tmp_path):
    out = funcrl.export(run, tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    task = SumDigits()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == task.tokenizer.end
    assert model.generation_config.eos_token_id == task.tokenizer.end
    network, params = funcrl.load_params(out)
    lengths = set()
    for prompt in task.prompts(0, 0, 8):
        tokens = task.tokenizer.encode(prompt.text)
        sampling = Sampling(max_tokens=20, temperature=0.0, stop_tokens=(task.tokenizer.end,))
        ours = sample(network, params, [tokens], sampling, 0)
        theirs = model.generate(
            **tokenizer(prompt.text, return_tensors="pt"), max_new_tokens=20, do_sample=False
        )[0, len(tokens) :]
        completion = ours.tokens[0][ours.mask[0]].tolist()
        assert theirs.tolist() == completion
        assert tokenizer.decode(theirs) == task.tokenizer.decode(completion)
        lengths.add(len(completion))
    assert min(lengths) < 20  # some of them end by themselves


@pytest.mark.slow
def test_a_run_of_a_hybrid_is_exported_as_transformers_own(tmp_path):
    config = tiny(tmp_path / "run", model="micro-hybrid")
    state = funcrl.train(replace(config, warm_start=WarmStartConfig(steps=0))).state
    out = funcrl.export(tmp_path / "run", tmp_path / "model")
    network, params = funcrl.load_params(out)
    size = SumDigits().tokenizer.vocab_size
    assert network.config == funcrl.models.shape("micro-hybrid", vocab_size=size)
    assert all(torch.equal(params[name], leaf) for name, leaf in state.params.items())
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    tokens = torch.arange(9) % size
    ours = funcrl.functional(network)(params, tokens, torch.arange(9))
    assert type(model).__name__ == "Qwen3_5ForCausalLM"
    assert (model(tokens[None]).logits[0] - ours).abs().max() <= 1e-4


def test_a_run_from_before_is_exported_with_its_tasks_tokenizer(run, tmp_path):
    old = tmp_path / "old"
    shutil.copytree(run, old)
    shutil.rmtree(old / runs.TOKENIZER)
    out = funcrl.export(old, tmp_path / "model")
    assert len(transformers.AutoTokenizer.from_pretrained(out)) == SumDigits().tokenizer.vocab_size


class Unreadable:
    """A tokenizer that transformers cannot read."""

    def __init__(self, inner):
        self.vocab_size, self.end = inner.vocab_size, inner.end
        self.encode, self.decode = inner.encode, inner.decode


def test_a_tokenizer_that_cannot_be_written_is_named(tmp_path):
    folder, notes = tmp_path / "run", []
    task = SumDigits()
    task.tokenizer = Unreadable(task.tokenizer)
    funcrl.train(replace(tiny(folder), warm_start=WarmStartConfig(steps=0)), task=task)
    out = funcrl.export(folder, tmp_path / "model", note=notes.append)
    (note,) = notes
    assert f"{out} has no tokenizer" in note
    assert "files()" in note
    assert not (out / "tokenizer.json").exists()
    assert json.loads((out / "config.json").read_text())["eos_token_id"] == 0
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == 0


def test_a_gguf_file_without_a_tokenizer_says_so(run, tmp_path):
    notes = []
    funcrl.export(run, tmp_path / "model.gguf", note=notes.append)
    assert "llama.cpp needs one" in notes[0]


def test_a_run_is_not_exported_into_itself(run, tmp_path, capsys):
    link = tmp_path / "link"
    link.symlink_to(run)
    before = {each: each.read_bytes() for each in run.rglob("*") if each.is_file()}
    for out in (run, link, run / "checkpoints", run / "checkpoints" / "model", run / "reference",
                run / "tokenizer" / "x.gguf", link / "checkpoints" / "1"):  # fmt: skip
        ended = run_command(["export", "--run", run, "--out", out], capsys)
        assert ended.code == 1
        assert "export expects --out to be a new folder" in ended.err
        ended = run_command(["export", "--run", link, "--out", out], capsys)
        assert ended.code == 1
    assert {each: each.read_bytes() for each in run.rglob("*") if each.is_file()} == before
    assert funcrl.export(run, run / "model").exists()  # a folder of its own, which is no run's
    shutil.rmtree(run / "model")


def test_a_link_in_a_strangers_run_is_not_followed(run, tmp_path):
    theirs = tmp_path / "theirs"
    shutil.copytree(run, theirs)
    secret = tmp_path / "secret"
    secret.write_text('{"mine": 1}')
    (theirs / "tokenizer" / "tokenizer.json").unlink()
    (theirs / "tokenizer" / "tokenizer.json").symlink_to(secret)
    notes = []
    out = funcrl.export(theirs, tmp_path / "model", note=notes.append)
    assert not (out / "tokenizer.json").exists()
    assert "has no tokenizer" in notes[0]
    assert Path(out / "config.json").exists()


OWN = """
import transformers

def llama(vocab_size):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=vocab_size, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, attn_implementation="eager"))
"""


@pytest.mark.slow
def test_a_network_of_transformers_leaves_with_the_tasks_tokenizer(tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    config = tiny(tmp_path / "run", model=f"{tmp_path / 'own.py'}:llama")
    funcrl.train(replace(config, warm_start=WarmStartConfig(steps=0)))
    out = funcrl.export(tmp_path / "run", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    end = SumDigits().tokenizer.end
    assert model.generation_config.eos_token_id == end  # and not 2, Llama's own
    assert transformers.AutoTokenizer.from_pretrained(out).eos_token_id == end


@pytest.mark.slow
def test_every_token_that_ended_a_completion_ends_one_after_the_export(tmp_path):
    """The model's generation_config.json names another end than its chat template."""
    template = (
        "{% for m in messages %}<|start|>{{ m.role }} {{ m.content }}<|eot|>{% endfor %}"
        "{% if add_generation_prompt %}<|start|>assistant {% endif %}"
    )
    source, _ = tiny_pretrained(tmp_path / "source", template)
    other = {"bos_token_id": 1, "eos_token_id": 2, "temperature": 0.5}
    (source / "generation_config.json").write_text(json.dumps(other))
    tokenizer = funcrl.tasks.load_tokenizer(source)
    rows = [{"prompt": f"{n}", "answer": f"{n}"} for n in range(30)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = replace(
        tiny(tmp_path / "run", model=str(source)), task=str(tmp_path / "rows.jsonl"),
        warm_start=WarmStartConfig(steps=0), optimizer=OptimizerConfig(learning_rate=1e-3),
    )  # fmt: skip
    funcrl.train(config)
    out = funcrl.export(tmp_path / "run", tmp_path / "model")
    said = json.loads((out / "generation_config.json").read_text())
    assert set(said["eos_token_id"]) == set(tokenizer.ends) > {2}
    assert said["eos_token_id"][0] == tokenizer.end
    assert said["temperature"] == 0.5
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert set(model.generation_config.eos_token_id) == set(tokenizer.ends)
    # Where each token is the template's end, a text is one token long.
    made = model.generate(
        torch.tensor([[5]]), max_new_tokens=6, do_sample=False, pad_token_id=0,
        prefix_allowed_tokens_fn=lambda *_: [tokenizer.end],
    )  # fmt: skip
    assert made[0].tolist() == [5, tokenizer.end]
