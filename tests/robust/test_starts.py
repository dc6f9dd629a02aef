"""A start that fails leaves no folder, and a folder that was there as it was."""

import os
import shutil
from dataclasses import replace

import pytest
from cases import run_command as run

import funcrl
from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig
from funcrl.run.folder import Claim

FAILING = """
from funcrl.tasks import SumDigits

class Failing(SumDigits):
    name = "failing"

    def eval_prompts(self, count):
        raise ValueError("no held-out prompts today")
"""
TINY = ["--steps", "1", "--num-prompts", "2", "--num-generations", "2", "--warm-start.steps", "0"]


@pytest.mark.parametrize(
    "wrong",
    [
        ["--task", "nope"],
        ["--task", "missing.py:Task"],
        ["--task", "failing.py:Missing"],
        ["--model", "no/such/model"],
        ["--system-prompt", "Be brief."],
        ["--task", "failing.py:Failing"],  # after the folder has been opened
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("place", [["--run-dir", "runs/deep/x"], []], ids=["named", "free"])
def test_a_failed_start_leaves_no_folder(tmp_path, monkeypatch, capsys, wrong, place):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing.py").write_text(FAILING)
    code, out, err = run(["train", *place, *wrong, *TINY], capsys)
    assert code == 1, out
    assert "--resume" not in err
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    assert [each.name for each in tmp_path.iterdir()] == ["failing.py"]


def tree(folder):
    """Every file in a folder with its content, and every folder."""
    paths = sorted(folder.rglob("*"))
    return {str(each): each.read_bytes() if each.is_file() else None for each in paths}


class Failing(funcrl.tasks.SumDigits):
    """A task that fails after the folder has been opened."""

    def eval_prompts(self, count):
        raise RuntimeError("no held-out prompts today")


def tiny(folder, **options):
    return TrainConfig(run_dir=folder, steps=1, num_prompts=2, num_generations=2,
                       warm_start=WarmStartConfig(steps=0),
                       evaluation=EvaluationConfig(every=0), **options)  # fmt: skip


def test_a_failed_start_in_another_working_directory_cleans_up_its_own(tmp_path, monkeypatch):
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir()
    (two / "runs" / "failing-1").mkdir(parents=True)  # of somebody else
    monkeypatch.chdir(one)
    task = Failing()
    task.name = "failing"
    task.eval_prompts = lambda count: os.chdir(two) or 1 / 0
    with pytest.raises(ZeroDivisionError):
        funcrl.train(tiny(None), task=task)
    assert [*one.iterdir()] == []
    assert (two / "runs" / "failing-1").is_dir()


def test_a_run_without_a_folder_gets_the_first_free_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="no held-out prompts"):
        funcrl.train(tiny(None), task=Failing())
    assert not (tmp_path / "runs").exists()
    task = funcrl.tasks.SumDigits()
    task.name = "../mine"  # a name is no path
    folders = [funcrl.train(tiny(None), task=task).run_dir for _ in range(2)]
    assert folders == [tmp_path / "runs" / "mine-1", tmp_path / "runs" / "mine-2"]
    parts = funcrl.build(tiny(None))
    assert funcrl.train(tiny(None), parts=parts).run_dir == tmp_path / "runs" / "sum_digits-1"
    with pytest.raises(ValueError, match=r"train expects config\.run_dir, got none"):
        funcrl.train(tiny(None), resume=True)


@pytest.mark.parametrize("what", ["a note", "a run that began"])
def test_a_failed_start_leaves_a_folder_as_it_was(tmp_path, what):
    folder = tmp_path / "run"
    if what == "a run that began":  # and was stopped before its first checkpoint
        begun = replace(tiny(folder, seed=1), warm_start=WarmStartConfig(steps=1))
        with pytest.raises(KeyboardInterrupt):
            funcrl.train(begun, stop=lambda: True)
    else:
        folder.mkdir()
        (folder / "note.txt").write_text("mine")
    before = tree(folder)
    with pytest.raises(RuntimeError, match="no held-out prompts"):
        funcrl.train(tiny(folder), task=Failing(), resume=what == "a run that began")
    assert tree(folder) == before


def test_a_start_beside_another_run_takes_nothing_away(tmp_path):
    claim = Claim(tmp_path / "run")
    before = tree(tmp_path)
    with pytest.raises(FileExistsError, match="no other run"):
        funcrl.train(tiny(tmp_path / "run"))
    assert tree(tmp_path) == before
    claim.close()
