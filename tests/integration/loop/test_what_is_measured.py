"""What an evaluation is about, an accuracy or another reward; updates that are all skipped."""

import json
from dataclasses import replace

import pytest
import torch
from cases import run_command

import funcrl
from funcrl.config import (
    EvalConfig,
    EvaluationConfig,
    OptimizerConfig,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.run import report, runs

ROWS = [{"prompt": f"{n}+1=", "answer": n + 1} for n in range(10, 60)]
SMALL = TrainConfig(
    steps=2, num_prompts=2, num_generations=2, warm_start=WarmStartConfig(steps=4, num_prompts=2),
    evaluation=EvaluationConfig(every=1, num_prompts=4),
)  # fmt: skip


def brevity(prompt, completion):
    return -len(completion) / 100 - 0.01


def right(prompt, completion):
    return completion == prompt.answer


class Notes(funcrl.run.views.SilentView):
    def __init__(self, lines):
        self.note = lines.append


def test_a_brevity_is_logged_drawn_and_printed_by_its_own_name(tmp_path):
    notes = []
    task = funcrl.tasks.from_rows(ROWS, brevity)
    trained = funcrl.train(replace(SMALL, run_dir=tmp_path / "run"), task=task, view=Notes(notes))
    for row in trained.history:
        assert "eval/accuracy" not in row
        assert row["eval/rewards/brevity/mean"] == pytest.approx(row["eval/reward"])
        assert "warm_start/accuracy" not in row
    assert trained.history[0]["warm_start/steps"] == 4  # it does not end a warm start
    said = "\n".join(notes)
    assert "'brevity' is not right or wrong" in said
    assert "brevity -0" in repr(trained)
    assert "accuracy" not in repr(trained)
    page = report.write_report(trained.run_dir).read_text()
    assert "held-out brevity" in page
    assert "brevity (held out)" in page
    # The best checkpoint is chosen by it.
    kept = runs.read_history(trained.run_dir)
    assert max(row["eval/rewards/brevity/mean"] for row in kept) <= 0


def test_a_reward_of_zeros_and_ones_is_an_accuracy(tmp_path):
    task = funcrl.tasks.from_rows(ROWS, right)
    trained = funcrl.train(replace(SMALL, run_dir=tmp_path / "run"), task=task)
    assert all(row["eval/accuracy"] == 0 for row in trained.history)
    assert not any(name.startswith("eval/rewards/") for name in trained.history[0])


@pytest.mark.parametrize(
    ("accuracy", "name", "values", "expected"),
    [
        ("", "score", [0.0, 1.0], True),
        ("", "score", [0.0, 0.5], False),
        ("", "score", [0.0, -1.0], False),
        ("", "correct", [0.0, 0.5], True),
        ("correct", "correct", [0.25, torch.nan], True),
        ("correct", "correct", [-0.26], False),
        ("correct", "correct", [1.5], False),
    ],
)
def test_which_rewards_are_accuracies(accuracy, name, values, expected):
    task = funcrl.tasks.from_rows(ROWS)
    task.accuracy = accuracy
    found = funcrl.rollouts.is_accuracy(task, name, torch.tensor(values))
    assert found is expected


def test_an_evaluation_names_its_reward_as_well(tmp_path, capsys):
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "mine.py").write_text(
        "def brevity(prompt, completion):\n    return -len(completion) / 100 - 0.01\n"
    )
    out = tmp_path / "result.json"
    ended = run_command(
        ["eval", "--model", "micro", "--task", tmp_path / "rows.jsonl", "--max-tokens", 3,
         "--reward", f"{tmp_path / 'mine.py'}:brevity", "--num-prompts", 3, "--json", out],
        capsys,
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert "brevity     -0.0" in ended.out
    assert "accuracy" not in ended.out
    assert json.loads(out.read_text())["accuracy"] is None
    config = EvalConfig(model="micro", num_prompts=3, max_tokens=2)
    result = funcrl.evaluate(config)
    assert 0 <= result.low <= result.accuracy <= result.high <= 1
    assert result.rewards.keys() == {"correct"}


class Nothing(funcrl.tasks.SumDigits):
    """A reward that differs within a group."""

    def reward(self, prompt, completion):
        return {"correct": float(len(completion) % 2)}


def test_updates_that_are_skipped_are_told_of(tmp_path):
    notes = []
    rate = OptimizerConfig(learning_rate=1e30, schedule="constant", warmup=0)
    config = replace(
        SMALL, run_dir=tmp_path / "run", steps=12, optimizer=rate, num_generations=4,
        warm_start=WarmStartConfig(steps=0), evaluation=EvaluationConfig(every=0),
    )  # fmt: skip
    trained = funcrl.train(config, task=Nothing(), view=Notes(notes))
    assert trained.history[-1]["num_skipped_updates"] >= 5
    assert [line for line in notes if line.startswith("No update in the last 5 steps")]


def test_a_run_whose_updates_were_all_skipped_ends_with_an_error(tmp_path):
    def update(grads, state, params):
        return {name: leaf * float("nan") for name, leaf in grads.items()}, state

    optimizer = funcrl.types.GradientTransformation(lambda params: (), update)
    config = replace(
        SMALL, run_dir=tmp_path / "run", steps=6, num_generations=4,
        warm_start=WarmStartConfig(steps=0), evaluation=EvaluationConfig(every=0),
    )  # fmt: skip
    with pytest.raises(ValueError, match="all of which were skipped"):
        funcrl.train(config, task=Nothing(), optimizer=optimizer)
    assert len(runs.read_history(tmp_path / "run")) == 7  # and nothing is lost


@pytest.mark.parametrize(("size", "refused"), [("1", False), ("2", True), ("", False)])
def test_a_rank_of_several_is_refused(tmp_path, monkeypatch, size, refused):
    monkeypatch.setenv("WORLD_SIZE", size)
    config = replace(SMALL, run_dir=tmp_path / "run", warm_start=WarmStartConfig(steps=0))
    if refused:
        with pytest.raises(ValueError, match=r"one of 2 \(WORLD_SIZE\).*docs/scaling.md"):
            funcrl.train(config)
        assert not (tmp_path / "run").exists()
    else:
        funcrl.train(config)
