"""Runs of several ranks: torchrun as a user types it, and what a rank that fails does."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import funcrl
from funcrl.cli.ranks import joined_ranks
from funcrl.config import (
    AlgorithmConfig,
    CheckpointConfig,
    EvaluationConfig,
    RanksConfig,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.loop.build import empty_state
from funcrl.loop.ranks import check_ranks_agree
from funcrl.loop.rollouts.ranks import own_prompts
from funcrl.parallel import Axis, Mesh
from funcrl.run import runs

ROOT = Path(__file__).parents[3]
CONFIG = TrainConfig(
    steps=6, threads=1, numerics="exact", num_prompts=6, num_generations=4,
    packing="prefixes",  # as the command line chooses it
    warm_start=WarmStartConfig(steps=2), checkpoint=CheckpointConfig(every=2),
    evaluation=EvaluationConfig(every=3, num_prompts=9),
    algorithm=AlgorithmConfig(kl=0.05, reference_every=2),
)  # fmt: skip
OPTIONS = {
    "--steps": 6, "--threads": 1, "--numerics": "exact", "--num-prompts": 6,
    "--num-generations": 4, "--warm-start.steps": 2, "--checkpoint.every": 2,
    "--evaluation.every": 3, "--evaluation.num-prompts": 9, "--algorithm.kl": 0.05,
    "--algorithm.reference-every": 2,
}  # fmt: skip


def torchrun(folder, ranks, options=(), restarts=0, script=("-m", "funcrl", "train")):
    """Start ranks of a run as a user does; standard error goes to standard output."""
    words = [str(word) for pair in OPTIONS.items() for word in pair]
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks),
        "--max-restarts", str(restarts), "--standalone", *script,
        "--run-dir", str(folder), *words, *options,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def ended(process, seconds=100):
    """The status and the lines of a command that must end."""
    try:
        output, _ = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return process.returncode, output


def pid_of(process, rank):
    """The process of a rank, once it is there."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split():
            try:
                words = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if f"RANK={rank}".encode() in words:
                return int(child)
        time.sleep(0.05)
    raise AssertionError(f"rank {rank} did not start")


def wait_for_step(folder, step, seconds=120):
    """Return once a run has done a step."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        lines = (folder / runs.METRICS).read_text().splitlines() if folder.exists() and (
            folder / runs.METRICS).exists() else []  # fmt: skip
        if len(lines) > step:
            return
        time.sleep(0.02)
    raise AssertionError(f"step {step} was not done")


def params_of(folder, config=CONFIG):
    state, _ = funcrl.restore(folder / "checkpoints", like=empty_state(funcrl.build(config)))
    return state.params


def assert_same_run(folder, whole, tolerance=0.0):
    """The bits of the parameters, and the completions and metrics up to rounding."""
    found = params_of(folder)
    for name, leaf in whole.state.params.items():
        assert (found[name] - leaf).abs().max() <= tolerance, name
    rows = runs.read_history(folder)
    assert [row["step"] for row in rows] == [row["step"] for row in whole.history]
    for row, wanted in zip(rows, whole.history, strict=True):
        assert {n for n in row if "time" not in n} == {n for n in wanted if "time" not in n}
        for name in row.keys() - {"padding_frac"}:
            if "time" not in name:
                assert row[name] == pytest.approx(wanted[name], rel=1e-4, abs=1e-6, nan_ok=True)
    ours, theirs = ((each / runs.COMPLETIONS).read_text() for each in (folder, whole.run_dir))
    texts = [
        [json.loads(line)["completion"] for line in each.splitlines()] for each in (ours, theirs)
    ]
    assert texts[0] == texts[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The run of one process that nothing stops."""
    threads = torch.get_num_threads()
    try:
        return funcrl.train(replace(CONFIG, run_dir=tmp_path_factory.mktemp("whole") / "run"))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--ranks.shard-size", "2")])
def test_ranks_that_share_their_state_do_the_run_of_one_process(tmp_path, whole, options):
    """Up to the rounding of the norm that clips; then one process goes on with it."""
    status, output = ended(torchrun(tmp_path / "run", 4, ("--shard", "state", *options)))
    assert status == 0, output
    assert output.count("step 6/6") == 1  # one view
    assert_same_run(tmp_path / "run", whole, tolerance=1e-6)
    threads = torch.get_num_threads()
    try:
        config = replace(CONFIG, run_dir=tmp_path / "run", steps=7)
        assert len(funcrl.train(config, resume=True).history) == 8
    finally:
        torch.set_num_threads(threads)
    (change,) = [
        row for _, row in runs.each_line("train", tmp_path / "run" / runs.CHANGES)
        if row["option"] == "ranks"
    ]  # fmt: skip
    assert (change["from"], change["to"]) == ("4", "1")


@pytest.mark.parametrize(("sharing", "options"), [(1, {}), (4, {"shard_size": 2})])
def test_a_mesh_of_other_groups_than_the_options_say_is_refused(sharing, options):
    mesh = Mesh(shard=Axis(sharing), all=Axis(4))
    config = TrainConfig(shard="state", ranks=RanksConfig(**options))
    with pytest.raises(ValueError, match=rf"^train expects make_mesh.* got {sharing} with"):
        check_ranks_agree(config, {}, mesh)


@pytest.mark.parametrize("sharing", [1, 3, 8])
def test_groups_that_the_ranks_cannot_be_divided_into_are_refused(monkeypatch, sharing):
    places = {"WORLD_SIZE": 4, "RANK": 0, "LOCAL_RANK": 0, "MASTER_ADDR": "x", "MASTER_PORT": 1}
    for name, value in places.items():
        monkeypatch.setenv(name, str(value))
    config = TrainConfig(shard="state", ranks=RanksConfig(shard_size=sharing))
    refused = pytest.raises(ValueError, match=rf"--ranks.shard-size .* 4 ranks .* got {sharing}")
    with refused, joined_ranks(config):
        pass


@pytest.mark.slow
def test_ranks_that_are_killed_go_on_to_the_same_bits(tmp_path, whole):
    process = torchrun(tmp_path / "run", 2, restarts=3)
    for rank, step in ((1, 1), (0, 3)):
        wait_for_step(tmp_path / "run", step)
        os.kill(pid_of(process, rank), signal.SIGKILL)
        time.sleep(1.0)  # until torchrun has seen it
    status, output = ended(process)
    assert status == 0, output
    assert "another rank has ended or does not answer" in output
    assert_same_run(tmp_path / "run", whole)


@pytest.mark.slow
def test_a_rank_that_hangs_ends_the_run(tmp_path):
    process = torchrun(tmp_path / "run", 2, ("--ranks.timeout", "5", "--steps", "500"))
    wait_for_step(tmp_path / "run", 1)
    waiting, stopped = (pid_of(process, rank) for rank in (0, 1))
    os.kill(stopped, signal.SIGSTOP)
    end = time.monotonic() + 30
    while Path(f"/proc/{waiting}").exists() and time.monotonic() < end:
        time.sleep(0.1)  # until it has had enough of the other
    assert not Path(f"/proc/{waiting}").exists()
    os.kill(stopped, signal.SIGCONT)  # or torchrun would wait 30 s for it to end
    status, output = ended(process, seconds=60)
    assert status == 1
    assert "funcrl (rank 0): another rank has ended or does not answer (--ranks.timeout)" in output
    assert "go on with: funcrl train --resume" in output


@pytest.mark.slow
def test_ctrl_c_saves_once(tmp_path):
    options = ("--steps", "500", "--checkpoint.every", "100", "--shard", "optimizer")
    process = torchrun(tmp_path / "run", 2, options)
    wait_for_step(tmp_path / "run", 2)
    process.send_signal(signal.SIGINT)  # to torchrun, which sends it on
    _, output = ended(process, seconds=60)
    assert output.count("Saved step") == 1
    last = runs.read_history(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run" / "checkpoints" / str(last)).exists()


@pytest.mark.slow
def test_ranks_of_other_options_or_with_a_reward_that_raises_end_by_name(tmp_path):
    """By a script of a user, in Python."""
    script = tmp_path / "script.py"
    script.write_text(f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from datetime import timedelta
from torch import distributed
import funcrl
from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig

rank, kind, folder = int(os.environ["RANK"]), sys.argv[-1], sys.argv[2]
distributed.init_process_group("gloo", timeout=timedelta(seconds=60))
mesh = funcrl.parallel.make_mesh(timeout=60.0)

def reward(prompts, completions, trainer_state, log_metric, log_extra):
    if rank == 1 and kind == "raise":
        raise KeyError("no such answer")
    assert trainer_state.max_steps == 2
    log_metric("which_rank", rank + trainer_state.global_step)
    log_extra("length", [len(each) for each in completions])
    return [float(len(each)) for each in completions]

rows = [{{"prompt": str(number), "answer": ""}} for number in range(8)]
task = funcrl.tasks.from_rows(rows, reward=reward)
prompts = 4 + (rank if kind == "differ" else 0)
config = TrainConfig(run_dir=folder, steps=2, threads=1, num_prompts=prompts, num_generations=2,
    warm_start=WarmStartConfig(steps=0), evaluation=EvaluationConfig(every=0))
trained = funcrl.train(config, task=task, mesh=mesh)
total = sum(leaf.sum().item() for leaf in trained.state.params.values())
sys.stdout.write(f"\\nafter {{len(trained.history)}}: {{total}}\\n")  # at once, as two ranks write
distributed.destroy_process_group()
""")
    for kind, expected in (
        ("differ", r"got --num-prompts 4 on rank 0 and 5 on rank 1"),
        ("raise", r"no such answer"),
    ):
        status, output = ended(torchrun(tmp_path / kind, 2, [kind], script=[str(script)]))
        assert status == 1
        assert expected in output, output
    status, output = ended(torchrun(tmp_path / "good", 2, ["good"], script=[str(script)]))
    assert status == 0, output
    said = re.findall("after 3: ([^ \n]+)\n", output)
    assert len(said) == 2, output
    assert said[0] == said[1]
    logged = [row["which_rank"] for row in runs.read_history(tmp_path / "good")[1:]]
    assert logged == [0.5, 1.5]  # the mean of two ranks
    seen = runs.read_lines(tmp_path / "good" / runs.COMPLETIONS)
    assert all(row["extra"] == {"length": len(row["completion"])} for row in seen)
    assert len({row["prompt"] for row in seen}) > 1


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_each_prompt_is_on_one_rank_and_equal_ones_together(size):
    texts = ["a", "b", "a", "c", "d", "e", "b", "f"]
    shares = [own_prompts(texts, Axis(size, rank)) for rank in range(size)]
    assert sorted(place for share in shares for place in share) == list(range(len(texts)))
    for share in shares:
        assert share == sorted(share)
        for place in share:
            equal = [other for other, text in enumerate(texts) if text == texts[place]]
            assert set(equal) <= set(share)
    assert max(map(len, shares)) - min(map(len, shares)) <= 2
