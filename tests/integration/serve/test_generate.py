"""`funcrl generate`: the answers of a run's model, and of weights, are what a generator draws."""

import io
import json
import sys

import pytest
from cases import TEMPLATES, run_command, tiny_pretrained

import funcrl
from funcrl.config import EvaluationConfig, GenerateConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.serve.generate import generate


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has learned sums of two digits from their answers."""
    folder = tmp_path_factory.mktemp("runs") / "sums"
    funcrl.train(
        TrainConfig(
            task="sum_digits:2", run_dir=folder, steps=1, warm_start=WarmStartConfig(steps=150),
            evaluation=EvaluationConfig(every=0),
        )
    )  # fmt: skip
    return folder


@pytest.mark.slow
def test_a_run_answers(run, capsys):
    prompts = [prompt.text for prompt in funcrl.tasks.load("sum_digits:2").prompts(0, 0, 3)]
    code, out, err = run_command(
        ["generate", "--model", run, "--temperature", "0", *prompts], capsys
    )
    assert (code, err) == (0, "")
    loaded = funcrl.load_run(run)
    sampler = funcrl.generators.Sampler(loaded.model)
    sampler.push(loaded.params)
    tokenizer = loaded.task.tokenizer
    sampling = Sampling(max_tokens=256, temperature=0.0, stop_tokens=(tokenizer.end,))
    samples = sampler.generate([tokenizer.encode(each) for each in prompts], sampling, seed=0)
    rows = zip(samples.tokens.tolist(), samples.mask.sum(dim=1).tolist(), strict=True)
    assert out.splitlines() == [tokenizer.decode(tokens[:length]) for tokens, length in rows]


@pytest.mark.slow
def test_lines_of_json_and_standard_input(run, capsys, monkeypatch):
    (prompt,) = [each.text for each in funcrl.tasks.load("sum_digits:2").prompts(0, 0, 1)]
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{prompt}\n"))
    options = ["--model", run, "--num-samples", "4", "--max-tokens", "1", "--seed", "3", "--json"]
    code, out, _ = run_command(["generate", *options], capsys)
    assert code == 0
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["prompt"] for each in found] == [prompt] * 4
    assert {each["finish_reason"] for each in found} <= {"length", "stop"}
    for words in ([prompt], ["--prompt", prompt], ["--prompts", prompt], [f"--prompt={prompt}"]):
        assert run_command(["generate", *options, *words], capsys).out == out


@pytest.mark.slow
def test_weights_in_a_folder_answer_a_message(tmp_path, capsys):
    folder, _ = tiny_pretrained(tmp_path / "model", TEMPLATES["chatml"])
    config = GenerateConfig(model=str(folder), max_tokens=3, system_prompt="Be brief.")
    (answer,) = generate(config, ["Hello"], print)
    assert answer.prompt == "Hello"
    other = generate(GenerateConfig(model=str(folder), max_tokens=3), ["Hello"], print)
    assert other == generate(GenerateConfig(model=str(folder), max_tokens=3), ["Hello"], print)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["hello"], "generate expects --model, the folder of a run or weights, got none."),
        (["--model", "micro", "hello"], "got 'micro', which has learned nothing."),
        (["--model", "micro", ""], "generate expects prompts behind the options"),
        (["--model", "no/such", "x"], "no/such"),
        (["--model", "micro", "--max-tokens", "0", "x"], "--max-tokens"),
    ],
)
def test_what_cannot_be_answered_is_named(line, message, capsys):
    code, out, err = run_command(["generate", *line], capsys)
    assert code in (1, 2)
    assert out == ""
    assert message in err
    assert len(err.splitlines()) <= 2


@pytest.mark.slow
def test_a_run_keeps_its_own_system_prompt(run):
    with pytest.raises(ValueError, match="--system-prompt and --enable-thinking with"):
        generate(GenerateConfig(model=str(run), system_prompt="x"), ["1+1="], print)
