"""Each example is short, says what it takes, learns in a few steps, and leaves nothing behind."""

import importlib
import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from engines import needs_vllm

import funcrl

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPTS = sorted(EXAMPLES.glob("*.py"))
WITH_OPTIONS = [path for path in SCRIPTS if "tyro.cli(" in path.read_text()]


@pytest.fixture
def load(tmp_path, monkeypatch):
    """Imports an example, to be run where nothing may appear but runs/."""
    there = contents()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLES)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield importlib.import_module
    assert {each.name for each in tmp_path.iterdir()} <= {"runs"}
    assert contents() == there


def contents():
    """Return what the folder holds, but for bytecode, which any process may write."""
    return {*EXAMPLES.iterdir()} - {EXAMPLES / "__pycache__"}


def gain(rewards):
    """Return the mean of the last three rewards, less that of the first three."""
    return sum(rewards[-3:]) / 3 - sum(rewards[:3]) / 3


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_it_is_short_and_listed(path):
    text = path.read_text()
    assert len(text.splitlines()) < 80
    assert re.search(rf"\n    (VLLM_\S+ )?python examples/{path.name}", text)
    assert f"({path.name})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("path", WITH_OPTIONS, ids=lambda path: path.stem)
def test_help_has_its_options(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(path), "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 0
    printed = capsys.readouterr().out
    assert f"usage: {path}" in printed
    assert "--" in printed.replace("--help", "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "least"),
    [
        ("first_policy", {"steps": 25}, 0.1),
        ("own_task", {"steps": 30, "num_prompts": 32}, 0.08),
        ("trl_environment", {"steps": 30}, 0.1),
        ("own_model", {"steps": 25, "num_prompts": 16}, 0.15),
        ("transformers_model", {"steps": 25}, 0.08),
        ("lora", {"steps": 8, "base_steps": 150, "out": Path("runs/merged")}, 0.15),
    ],
)
def test_it_learns(load, name, options, least):
    example = load(name)
    result = example.main(example.Config(**options))
    # The rewards of a loop, or the metrics of a run, whose step 0 has none.
    rewards = result if isinstance(result[0], float) else [row["reward"] for row in result[1:]]
    assert len(rewards) == options["steps"]
    assert gain(rewards) > least


@pytest.mark.slow
def test_a_model_that_was_saved_is_trained_on(load, capsys):
    example = load("transformers_model")
    example.main(example.Config(steps=1))
    first = capsys.readouterr().out.splitlines()[-1]
    again = example.Config(model="runs/repeat-1/model", learning_rate=1e-9, steps=1)
    example.main(again)
    second = capsys.readouterr().out.splitlines()[-1]
    assert second == first.replace("repeat-1", "repeat-2")  # what transformers generates


@pytest.mark.slow
def test_verifiers_plays_and_the_policy_is_trained(load):
    rewards = load("verifiers_environment").main(steps=3)
    assert len(rewards) == 3
    assert min(rewards) > 0.1  # four guesses at random find one of ten digits that often


@pytest.mark.slow
def test_both_algorithms_learn(load):
    example = load("own_algorithm")
    curves = example.main(example.Config(steps=25, num_prompts=16))
    assert curves.keys() == {"grpo", "quadratic"}
    assert curves["grpo"][0] == curves["quadratic"][0]  # the same prompts and samples
    assert min(map(gain, curves.values())) > 0.06


@pytest.mark.slow
def test_the_compiled_step_has_the_bits_of_the_plain_one(load):
    example = load("compiled_step")
    assert example.main(example.Config(steps=1, rows=8, length=24, num_layers=2)) == 0


class TestVLLM:
    pytestmark = needs_vllm

    def test_it_learns(self, load):
        example = load("vllm_loop")
        assert gain(example.main(example.Config(steps=25))) > 0.06


@pytest.mark.slow
def test_ray_starts_the_ranks_of_a_run(tmp_path):
    """On this machine, with a home of its own, and a short one: Ray leaves sockets there."""
    home = tempfile.mkdtemp(prefix="ray")
    command = [
        sys.executable, "-W", "ignore", EXAMPLES / "ray_train.py", "--num-workers", "2",
        "--run-dir", "run", "--steps", "3", "--warm-start.steps", "1", "--num-prompts", "4",
        "--evaluation.every", "0", "--shard", "optimizer",
    ]  # fmt: skip
    environment = {
        "HOME": home, "RAY_TMPDIR": home, "RAY_USAGE_STATS_ENABLED": "0",
        # Its processes would yield to every other one of the machine: minutes beside other tests.
        "RAY_worker_niceness": "0",
        # After 60 s it would start the workers again, and again where two cores have much to do.
        "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
        "PYTHONPATH": str(EXAMPLES.parent), "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        list(map(str, command)), cwd=tmp_path, env=os.environ | environment,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    shutil.rmtree(home, ignore_errors=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "2 ranks, step 3, reward" in done.stdout
    assert [row["step"] for row in funcrl.runs.read_history(tmp_path / "run")] == [0, 1, 2, 3]
