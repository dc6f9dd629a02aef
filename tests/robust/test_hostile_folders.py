"""A run's folder after kills, with links in it, and while other processes read it."""

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import fork_killer
import pytest
import torch
from cases import equal, run_command

import funcrl
from funcrl import runs
from funcrl.config import (
    CheckpointConfig,
    EvaluationConfig,
    LogConfig,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.run.checkpoint import Checkpoints, restore

SMALL = TrainConfig(
    steps=3, num_prompts=2, num_generations=2, warm_start=WarmStartConfig(steps=0),
    evaluation=EvaluationConfig(every=0), checkpoint=CheckpointConfig(every=1),
)  # fmt: skip


@pytest.mark.slow
def test_forks_that_are_killed_go_on_as_forks(tmp_path):
    """Also those that are killed before their first checkpoint; their drafts are swept."""
    run = subprocess.run(
        [sys.executable, "-W", "ignore", fork_killer.__file__, tmp_path, "3"],
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    early = int(run.stdout.split(", ")[1].split()[0])
    assert early > 0, run.stdout


@pytest.mark.parametrize("name", ["checkpoints", "reference", "tokenizer", "tensorboard"])
def test_a_run_does_not_begin_where_a_link_leads_elsewhere(tmp_path, capsys, name):
    mine = funcrl.train(replace(SMALL, run_dir=tmp_path / "mine")).run_dir
    there = sorted(mine.rglob("*"))
    theirs = tmp_path / "theirs"
    funcrl.train(replace(SMALL, run_dir=theirs))
    if (theirs / name).exists():
        (theirs / name).rename(tmp_path / "moved")
    target = mine / name if (mine / name).exists() else mine
    (theirs / name).symlink_to(target)
    ended = run_command(["train", "--resume", theirs, "--steps", 6], capsys)
    assert ended.code == 1
    assert f"{theirs / name} to be no link" in ended.err
    assert sorted(mine.rglob("*")) == there


def test_what_killed_processes_left_is_swept_at_a_resume(tmp_path, capsys):
    folder = funcrl.train(replace(SMALL, run_dir=tmp_path / "run")).run_dir
    kept = sorted(folder.rglob("*"))
    for name in (".metrics.jsonl.71", ".config.yaml.8", "tokenizer/.tokenizer.json.9"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("torn")
    for name in (".reference.77.draft", "checkpoints/.1.gone", "checkpoints/.9.5.draft"):
        (folder / name / "state").mkdir(parents=True)
    foreign = folder / ".metrics.jsonl.bak"
    foreign.write_text("somebody's")
    newest = folder / "checkpoints" / str(SMALL.steps)
    newest.rename(newest.with_name(f".{SMALL.steps}.old"))  # as a save killed between two renames
    assert run_command(["train", "--resume", folder], capsys).code == 0
    assert sorted(folder.rglob("*")) == sorted([*kept, foreign])


def test_lines_that_are_removed_under_a_run_end_it(tmp_path):
    class Removing(funcrl.tasks.SumDigits):
        def prompts(self, seed, start, count):
            if start == 2 * count:
                (tmp_path / "run" / runs.METRICS).unlink()
            return super().prompts(seed, start, count)

    with pytest.raises(FileNotFoundError, match="somebody has removed it") as error:
        funcrl.train(replace(SMALL, run_dir=tmp_path / "run"), task=Removing())
    assert "go on with" in "".join(error.value.__notes__)


@pytest.mark.slow
def test_a_checkpoint_that_is_read_is_not_thinned_out(tmp_path):
    """A reader beside a process that saves, and keeps one, always gets a whole one."""
    state = {name: torch.full((50,), 0.0) for name in "abcdefgh"}
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    checkpoints.save(0, state)
    checkpoints.wait()
    failed, found, ended = [], [], threading.Event()

    def reading():
        while not ended.is_set():
            try:
                found.append(restore(tmp_path, like=state)[0])
            except Exception as error:
                failed.append(error)

    reader = threading.Thread(target=reading)
    reader.start()
    for step in range(1, 25):
        checkpoints.save(step, {name: leaf + step for name, leaf in state.items()})
        checkpoints.wait()
    ended.set()
    reader.join()
    checkpoints.save(25, state)  # what was read meanwhile goes now
    checkpoints.close()
    assert not failed, failed[0]
    assert len(found) > 3
    assert all(len({float(x) for leaf in each.values() for x in leaf}) == 1 for each in found)
    assert checkpoints.steps() == [25]


def test_a_parent_whose_checkpoint_is_gone_is_named(tmp_path):
    parent = funcrl.train(replace(SMALL, run_dir=tmp_path / "parent")).run_dir
    fork = tmp_path / "fork"
    fork.mkdir()
    for name in (runs.CONFIG, runs.ENVIRONMENT):
        (fork / name).write_text((parent / name).read_text())
    facts = {**runs.read_facts(parent), "parent": str(parent), "parent_step": "77"}
    (fork / runs.ENVIRONMENT).write_text(json.dumps(facts))
    with pytest.raises(ValueError, match=r"parent/checkpoints/77"):
        funcrl.train(replace(SMALL, run_dir=fork), resume=True)
    facts["parent_step"] = "3"
    (fork / runs.ENVIRONMENT).write_text(json.dumps(facts))
    resumed = funcrl.train(replace(SMALL, run_dir=fork, steps=4), resume=True)
    plain = replace(SMALL, run_dir=tmp_path / "other", steps=4)
    assert equal(resumed.state, funcrl.train(plain, fork=parent).state)
    assert Path(runs.read_facts(fork)["parent"]) == parent


def test_a_tracker_writes_through_no_link(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").symlink_to(tmp_path)
    config = replace(SMALL, run_dir=tmp_path / "run", log=LogConfig(trackers=("tensorboard",)))
    with pytest.raises(OSError, match="tensorboard to be no link"):
        funcrl.train(config)
    assert [each.name for each in tmp_path.iterdir()] == ["run"]


def test_a_new_run_is_no_fork_because_of_what_a_killed_one_left(tmp_path):
    """A fork that was killed before it was one leaves its environment.json alone."""
    parent = funcrl.train(replace(SMALL, run_dir=tmp_path / "parent")).run_dir
    folder = tmp_path / "new"
    folder.mkdir()
    facts = {**runs.read_facts(parent), "parent": str(parent), "parent_step": "3"}
    (folder / runs.ENVIRONMENT).write_text(json.dumps(facts))
    begun = funcrl.train(replace(SMALL, run_dir=folder))
    assert equal(begun.state, funcrl.train(replace(SMALL, run_dir=tmp_path / "other")).state)
    assert "parent" not in runs.read_facts(folder)
