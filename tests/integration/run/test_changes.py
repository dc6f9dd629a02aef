"""A run keeps what it was trained with: changes are refused, or recorded, or of a fork."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cases import equal

import funcrl
from funcrl import runs
from funcrl.config import (
    MAY_CHANGE,
    AlgorithmConfig,
    CompileConfig,
    EvaluationConfig,
    LogConfig,
    OptimizerConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
    changed_options,
)
from funcrl.core import process
from funcrl.run import report
from funcrl.run.folder import describe_changes
from funcrl.run.report.run import change_rows
from funcrl.run.views import SilentView


class Notes(SilentView):
    def __init__(self):
        self.lines = []

    def note(self, line):
        self.lines.append(line)


def tiny(folder, steps=2, **options):
    options = {"evaluation": EvaluationConfig(every=0), "log": LogConfig(completions_every=1),
               "sampling": Sampling(max_tokens=3)} | options  # fmt: skip
    return TrainConfig(run_dir=folder, steps=steps, num_prompts=2, num_generations=2,
                       warm_start=WarmStartConfig(steps=0), threads=1, **options)  # fmt: skip


@pytest.fixture(scope="module")
def parent(tmp_path_factory):
    """A run of 2 steps with a KL penalty, and so a reference policy."""
    folder = tmp_path_factory.mktemp("parent") / "run"
    funcrl.train(tiny(folder))
    return folder


def contents(folder):
    return {each: each.read_bytes() for each in sorted(folder.rglob("*")) if each.is_file()}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"seed": 1}, "--seed 1 (was 0)"),
        ({"num_prompts": 4}, "--num-prompts 4 (was 2)"),
        ({"model": "tiny"}, "--model tiny (was micro)"),
        ({"dtype": "bfloat16"}, "--dtype bfloat16 (was float32)"),
        ({"algorithm": AlgorithmConfig(name="dapo")}, "--algorithm.name dapo (was grpo)"),
        (
            {"optimizer": OptimizerConfig(learning_rate=0.005, warmup=3), "steps": 9},
            "--optimizer.learning-rate 0.005 (was 0.002), --optimizer.warmup 3 (was 20); --fork",
        ),
        ({"reward_weights": {"correct": 2.0}}, '--reward-weights {"correct": 2.0} (was {})'),
    ],
)
def test_a_change_of_what_is_trained_is_refused_by_name(parent, options, named):
    before = contents(parent)
    with pytest.raises(ValueError, match=r"train expects the options that") as refused:
        funcrl.train(replace(tiny(parent), **options), resume=True)
    assert named in str(refused.value)
    assert "--fork NEW_FOLDER" in str(refused.value)
    assert contents(parent) == before


def test_every_option_that_may_change_is_one():
    names = {change.option.partition(".")[0] for change in changed_options(
        tiny(Path("a")), replace(tiny(Path("b")), compile=CompileConfig()))}  # fmt: skip
    assert names == {"compile"}  # and not where the run lies
    fields = {name.replace("_", "-") for name in vars(tiny(Path("a")))}
    assert {*MAY_CHANGE} <= fields


def test_an_absent_option_is_left_out_and_an_absent_fact_unknown(tmp_path):
    rows = [{"step": 1, "option": "microbatch", "from": None, "to": 2},
            {"step": 1, "option": "commit", "from": "abc", "to": None},
            {"step": 1, "option": "task", "from": {"a": True}, "to": "a\x07"}]  # fmt: skip
    runs.append_lines(tmp_path / runs.CHANGES, rows)
    assert describe_changes(tiny(tmp_path), rows) == [
        "From step 2 on: microbatch 2 (was left out).",
        "From step 2 on: commit unknown (was abc).",
        'From step 2 on: task a\\x07 (was {"a": true}).',
    ]
    assert change_rows(tmp_path) == [
        ["2", "microbatch", "left out", "2"],
        ["2", "commit", "abc", "unknown"],
        ["2", "task", '{"a": true}', "a\\x07"],
    ]


def test_a_file_that_has_moved_is_no_change():
    def change(before, after):
        old, new = (replace(tiny(Path("a")), task=task) for task in (before, after))
        return [each.option for each in changed_options(old, new)]

    assert change("/old/mine.py:Task", "new/mine.py:Task") == []
    assert change("/old/mine.py:Task", "/old/mine.py:Other") == ["task"]
    assert change("gsm8k", "math") == ["task"]


@pytest.mark.slow
def test_what_may_change_is_recorded_with_its_step(tmp_path):
    folder, view = tmp_path / "run", Notes()
    funcrl.train(tiny(folder, steps=1))
    assert not (folder / runs.CHANGES).exists()
    later = tiny(folder, steps=2, microbatch=2)
    funcrl.train(later, resume=True, view=view)
    recorded = [{"step": 1, "option": "steps", "from": 1, "to": 2},
                {"step": 1, "option": "microbatch", "from": None, "to": 2}]  # fmt: skip
    assert runs.read_lines(folder / runs.CHANGES) == recorded
    assert "From step 2 on: steps 2 (was 1)." in view.lines
    assert "From step 2 on: microbatch 2 (was left out)." in view.lines
    assert any("linear schedule" in line for line in view.lines)
    funcrl.train(later, resume=True)
    assert runs.read_lines(folder / runs.CHANGES) == recorded
    page = report.write_report(folder).read_text()
    assert "<h2>Changes</h2>" in page
    assert "microbatch" in page.partition("<h2>Changes</h2>")[2][:500]


@pytest.mark.slow
def test_a_fork_begins_as_its_parent_and_leaves_it_alone(parent, tmp_path):
    before, new = contents(parent), tmp_path / "new"
    forked = tiny(new, steps=3, seed=7, optimizer=OptimizerConfig(learning_rate=1e-3))
    stopped = {"stop": lambda: True}
    with pytest.raises(KeyboardInterrupt):
        funcrl.train(replace(forked, steps=4), fork=parent, **stopped)
    assert contents(parent) == before
    facts = runs.read_facts(new)
    assert (facts["parent"], facts["parent_step"]) == (str(parent), "2")
    history = [row["step"] for row in runs.read_lines(new / runs.METRICS)]
    assert history == [0, 1, 2, 3]
    assert runs.read_lines(new / runs.METRICS)[:3] == runs.read_lines(parent / runs.METRICS)
    assert {change["option"] for change in runs.read_lines(new / runs.CHANGES)} == {
        "steps", "seed", "optimizer.learning-rate",
    }  # fmt: skip
    # From here on it is an ordinary run, which resumes by itself, to the same bits.
    resumed = funcrl.train(replace(forked, steps=4), resume=True)
    assert int(resumed.state.seed) == 7
    assert runs.read_facts(new)["parent"] == str(parent)
    whole = funcrl.train(replace(forked, steps=4, run_dir=tmp_path / "whole"), fork=parent)
    assert equal(resumed.state, whole.state)
    reference = [funcrl.restore(each / "reference", like=whole.state.params)[0]
                 for each in (parent, new)]  # fmt: skip
    assert equal(*reference)


def test_a_fork_that_cannot_begin_leaves_nothing(parent, tmp_path):
    with pytest.raises(ValueError, match=r"got --model tiny \(was micro\): restore expects"):
        funcrl.train(replace(tiny(tmp_path / "new"), model="tiny"), fork=parent)
    plain = tiny(tmp_path / "new", optimizer=OptimizerConfig(name="sgd"))
    with pytest.raises(ValueError, match=r"--optimizer.name sgd \(was adamw\): restore expects"):
        funcrl.train(plain, fork=parent)
    with pytest.raises(ValueError, match="--steps of at least 2"):
        funcrl.train(tiny(tmp_path / "new", steps=1), fork=parent)
    with pytest.raises(ValueError, match="resume or fork"):
        funcrl.train(tiny(parent), fork=parent, resume=True)
    with pytest.raises(FileExistsError, match="without a run in it"):
        funcrl.train(tiny(parent), fork=parent)
    with pytest.raises(FileNotFoundError, match="--resume"):
        funcrl.train(tiny(tmp_path / "new"), fork=tmp_path / "none")
    assert not [*tmp_path.iterdir()]


def test_the_environment_names_funcrl_and_its_commit(parent, tmp_path, monkeypatch):
    facts = json.loads((parent / runs.ENVIRONMENT).read_text())
    assert facts["funcrl"] == funcrl.__version__
    assert facts.get("commit") == process.commit()
    monkeypatch.setenv("PATH", str(tmp_path))  # where no git is
    assert process.commit() is None
