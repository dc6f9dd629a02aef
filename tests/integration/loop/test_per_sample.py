"""Per-sample clipping as an option and as a part of a run: its metrics, and what it refuses."""

from dataclasses import replace

import pytest
from cases import equal, run_command
from meddling import small

import funcrl
from funcrl import CompileConfig, runs
from funcrl.config import OptimizerConfig, TrainConfig

NAMES = {
    "per_sample/grad_norm/mean", "per_sample/grad_norm/max", "per_sample/clipped_frac",
    "per_sample/noise", "per_sample/signal", "per_sample/noise_scale",
}  # fmt: skip


def test_the_option_clips_and_is_logged_and_drawn(tmp_path, capsys):
    options = ["--num-prompts", "4", "--warm-start.steps", "2", "--evaluation.every", "0"]
    ended = run_command(
        ["train", "--run-dir", tmp_path / "run", "--steps", "3", *options,
         "--optimizer.clip-per-sample", "0.001"], capsys)  # fmt: skip
    assert ended.code == 0, ended.err
    rows = runs.read_history(tmp_path / "run")[1:]
    trained = [row for row in rows if row["num_tokens"]]
    assert trained
    for row in trained:
        assert row.keys() >= NAMES
        assert row["per_sample/grad_norm/max"] >= row["per_sample/grad_norm/mean"] > 0
        # At most 32 gradients of a norm of 0.001.
        assert row["grad_norm"] <= 0.032
    assert any(row["per_sample/clipped_frac"] > 0 for row in trained)
    assert run_command(["report", tmp_path / "run"], capsys).code == 0
    assert "Per-sample gradients" in (tmp_path / "run" / "report.html").read_text()


def test_the_option_is_the_transform_and_a_resumed_run_keeps_it(tmp_path):
    clipped = OptimizerConfig(clip_per_sample=0.01)
    config = small(tmp_path / "option", optimizer=clipped, steps=3, num_prompts=6)
    whole = funcrl.train(config)
    given = replace(config, optimizer=OptimizerConfig(), run_dir=tmp_path / "given")
    part = funcrl.train(given, per_sample=funcrl.clip_per_sample(0.01))
    assert equal(whole.state, part.state)
    halves = replace(config, run_dir=tmp_path / "halves")
    stop = lambda: len(runs.read_history(tmp_path / "halves")) == 2  # noqa: E731 (as short)
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(halves, stop=stop)
    assert equal(funcrl.train(halves, resume=True).state, whole.state)


@pytest.mark.slow
def test_a_compiled_run_has_the_same_metrics(tmp_path):
    config = small(tmp_path / "eager", optimizer=OptimizerConfig(clip_per_sample=0.01))
    eager = funcrl.train(config).history[-1]
    fast = replace(config, run_dir=tmp_path / "fast", compile=CompileConfig())
    compiled = funcrl.train(fast).history[-1]
    for name in NAMES:
        assert compiled[name] == pytest.approx(eager[name], rel=1e-3), name


def test_packed_rows_are_refused_before_any_work(tmp_path):
    with pytest.raises(ValueError, match=r"--packing none with --optimizer.clip-per-sample"):
        TrainConfig(packing="samples", optimizer=OptimizerConfig(clip_per_sample=1.0))
    packed = small(tmp_path / "run", packing="samples")
    with pytest.raises(ValueError, match="--packing none with a per_sample transform"):
        funcrl.train(packed, per_sample=funcrl.clip_per_sample(1.0))
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
