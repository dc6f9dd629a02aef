"""`funcrl train --seeds`: a run for each seed, the same as alone, and one page with their means."""

import json
import statistics

import pytest
from cases import run_command

from funcrl.run.report.run import read_run
from funcrl.run.report.seeds import of_seeds

SMALL = ["--steps", "2", "--num-prompts", "4", "--num-generations", "2", "--warm-start.steps", "2",
         "--evaluation.every", "1", "--evaluation.num-prompts", "20"]  # fmt: skip


def rows_of(run):
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "time" not in name} for row in rows]


@pytest.mark.slow
def test_seeds_are_runs_of_their_own_and_one_page(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ["train", "--seeds", "3", "5", "4", *SMALL]
    ended = run_command(line, capsys)
    assert ended.code == 0, ended.err
    parent = tmp_path / "runs" / "sum_digits-1"
    runs = [parent / f"seed-{seed}" for seed in (3, 5, 4)]
    assert sorted(each.name for each in parent.iterdir()) == [
        "plots", "report.html", "seed-3", "seed-4", "seed-5",
    ]  # fmt: skip
    alone = run_command(["train", "--seed", "5", *SMALL, "--run-dir", "alone"], capsys)
    assert alone.code == 0
    assert rows_of(tmp_path / "alone") == rows_of(runs[1])
    reached = [rows_of(run)[-1]["eval/accuracy"] for run in runs]
    mean, spread = statistics.fmean(reached), statistics.stdev(reached)
    assert f"accuracy of 3 seeds: {mean:.3f} ± {spread:.3f}" in ended.out
    assert ended.out.splitlines()[-1] == "runs/sum_digits-1/report.html"
    page = (parent / "report.html").read_text()
    assert "sum_digits-1, 3 seeds" in page
    assert "one standard deviation to both sides" in page
    (whole,) = of_seeds([read_run(run) for run in runs])
    steps, values = whole.metrics["eval/accuracy"]
    lows, highs = whole.bands["eval/accuracy"]
    assert (steps, values[-1]) == ([0, 1, 2], pytest.approx(mean))
    assert (lows[-1], highs[-1]) == (pytest.approx(mean - spread), pytest.approx(mean + spread))
    # The same line goes on with what is left: nothing, and then one more seed.
    more = run_command([*line[:5], "6", *SMALL, "--run-dir", parent], capsys)
    assert more.code == 0, more.err
    assert more.out.count("Resumed") == 3
    assert rows_of(parent / "seed-6")
    changed = run_command([*line, "--run-dir", parent, "--num-prompts", "8"], capsys)
    assert changed.code == 1
    assert "num-prompts" in changed.err


def test_runs_that_differ_in_more_than_their_seed_stay_apart(tmp_path):
    def made(name, **config):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "metrics.jsonl").write_text('{"step": 0, "reward": 1.0}\n')
        (folder / "config.yaml").write_text(json.dumps(config))
        return read_run(folder)

    runs = [made("a", seed=0, steps=1), made("b", seed=1, steps=1), made("c", seed=1, steps=2)]
    whole, other = of_seeds(runs)
    assert whole.metrics["reward"] == ([0], [1.0])
    assert whole.bands["reward"] == ([1.0], [1.0])
    assert other == runs[2]
    same = [made("d", seed=0, steps=1), made("e", seed=0, steps=1)]
    assert of_seeds(same) == same


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--seeds", "1"], "expects several --seeds, each once, got 1."),
        (["--seeds", "1", "2", "1"], "each once, got 1 2 1."),
        (["--seeds", "1", "2", "--seed", "3"], "--seeds alone, in one process, got --seed too."),
        (["--seeds", "1", "x"], "--seeds"),
    ],
)
def test_seeds_that_cannot_be_are_refused(tmp_path, capsys, args, message):
    ended = run_command(["train", "--run-dir", tmp_path / "run", *args], capsys)
    assert ended.code in (1, 2)
    assert message in " ".join(ended.err.split())
    assert not (tmp_path / "run").exists()
