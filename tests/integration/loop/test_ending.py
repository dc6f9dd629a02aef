"""Runs that end before their last step: at a value, or by a callback; the same run until then."""

import json
from dataclasses import replace

import pytest
import torch
from cases import run_command

import funcrl
from funcrl.config import CheckpointConfig, EvaluationConfig, TrainConfig, WarmStartConfig

SMALL = TrainConfig(
    steps=4, num_prompts=4, num_generations=2, warm_start=WarmStartConfig(steps=2),
    evaluation=EvaluationConfig(every=2, num_prompts=8), checkpoint=CheckpointConfig(every=3),
)  # fmt: skip


def test_callbacks_see_each_row_and_one_may_end_the_run(tmp_path):
    seen, other = [], []

    def look(row):
        seen.append(row)
        row["step"] = None  # a copy

    def enough(row):
        other.append(row["step"])
        return row["step"] == 2

    whole = funcrl.train(replace(SMALL, run_dir=tmp_path / "whole"))
    config = replace(SMALL, run_dir=tmp_path / "run")
    ended = funcrl.train(config, callbacks=[look, enough, look])
    assert other == [0, 1, 2]
    assert len(seen) == 6
    assert [row["step"] for row in ended.history] == [0, 1, 2]
    assert ended.history[2]["reward"] == whole.history[2]["reward"]
    # It is saved, and goes on to the bits of a run that was not ended.
    rest = funcrl.train(config, resume=True)
    for name, leaf in whole.state.params.items():
        assert torch.equal(leaf, rest.state.params[name])


def test_what_a_callback_raises_ends_the_run_with_its_step_saved(tmp_path):
    def fail(row):
        if row["step"] == 2:
            raise RuntimeError("no more")

    config = replace(SMALL, run_dir=tmp_path / "run")
    with pytest.raises(RuntimeError, match="no more"):
        funcrl.train(config, callbacks=[fail])
    assert (config.run_dir / "checkpoints" / "2").exists()
    with pytest.raises(TypeError, match="^train expects callbacks to return True .* got 3 from"):
        funcrl.train(replace(config, run_dir=tmp_path / "other"), callbacks=[lambda row: 3])
    with pytest.raises(TypeError, match="callbacks"):
        funcrl.train(replace(config, run_dir=tmp_path / "x"), callbacks=[3])
    assert not (tmp_path / "x").exists()


def test_a_run_ends_at_a_value(tmp_path, capsys):
    options = ["--steps", "4", "--num-prompts", "4", "--num-generations", "2", "--warm-start.steps",
               "2", "--evaluation.every", "1", "--evaluation.num-prompts", "8"]  # fmt: skip
    line = ["train", "--run-dir", tmp_path / "run", *options, "--stop-at", "num_tokens=1"]
    ended = run_command(line, capsys)
    assert ended.code == 0, ended.err
    assert "Step 1 is the last: num_tokens is " in ended.out
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(row)["step"] for row in rows] == [0, 1]
    # Another value is no other run.
    more = run_command(["train", "--resume", tmp_path / "run", "--stop-at", "accuracy=0.0"], capsys)
    assert more.code == 0, more.err
    assert "Step 2 is the last: eval/accuracy is " in more.out


def test_an_accuracy_is_that_of_held_out_prompts_at_the_start_too(tmp_path):
    config = replace(SMALL, run_dir=tmp_path / "run", stop_at="accuracy=0")
    assert [row["step"] for row in funcrl.train(config).history] == [0]


@pytest.mark.parametrize("value", ["accuracy", "accuracy=", "=3", "accuracy=x", "reward=inf"])
def test_what_is_no_value_is_refused(value):
    with pytest.raises(ValueError, match="^train expects --stop-at METRIC=NUMBER"):
        TrainConfig(stop_at=value)
