"""The example learns, on the CPU, in a few steps; a whole run is the README's first command."""

import json
import sys
from pathlib import Path

import matplotlib
import pytest

matplotlib.use("Agg")
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import first_policy


@pytest.mark.slow
def test_the_first_policy_learns(tmp_path):
    config = first_policy.Config(steps=30, learning_rate=3e-3, out=tmp_path)
    history = first_policy.main(config)
    assert history[0]["reward"] < 0.15  # guessing gives 0.1
    assert sum(row["reward"] for row in history[-5:]) / 5 > 0.25
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(30))
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_run(tmp_path):
    config = first_policy.Config(steps=3, prompts=4, samples=4, out=tmp_path)
    rewards = [[row["loss"] for row in first_policy.main(config)] for _ in range(2)]
    assert rewards[0] == rewards[1]
