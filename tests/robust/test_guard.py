"""What a task may not do to the process that trains: end, move or fork it."""

import os
import subprocess
import sys

import meddling
import pytest
from cases import equal
from meddling import Meddling, small

import funcrl
from funcrl import cli, config, rollouts, runs
from funcrl.config import Sampling
from funcrl.loop.rollouts.grade import RewardError
from funcrl.tasks import Calculator, CharTokenizer, Prompt, SumDigits, adapt


def leave():
    sys.exit(0)


@pytest.mark.slow
def test_a_reward_that_calls_sys_exit_is_an_error_or_skipped(tmp_path):
    with pytest.raises(RewardError, match=r"'meddling' raised SystemExit.*for the completion"):
        funcrl.train(small(tmp_path / "stop"), task=Meddling(leave))
    skipped = small(tmp_path / "skip", on_reward_error="skip", num_prompts=8)
    rows = funcrl.train(skipped, task=Meddling(leave)).history
    assert rows[-1]["step"] == 2
    assert rows[-1]["num_reward_errors"] > 0


def test_a_reward_that_calls_sys_exit_is_an_error_of_grade():
    with pytest.raises(RewardError, match=r"'meddling' raised SystemExit.*'123'"):
        rollouts.grade(Meddling(leave), [Prompt("1+2=", "3")], ["123"])


def test_the_command_fails_when_a_task_calls_sys_exit(tmp_path, capsys):
    (tmp_path / "leaving.py").write_text(
        "import sys\n"
        "from funcrl.tasks import SumDigits\n"
        "class Leaving(SumDigits):\n"
        "    def reward(self, prompt, completion):\n"
        "        sys.exit(0)\n"
    )
    with pytest.raises(SystemExit) as ended:
        cli.main([
            "train", "--task", f"{tmp_path / 'leaving.py'}:Leaving", "--run-dir",
            str(tmp_path / "run"), "--warm-start.steps", "0", "--evaluation.every", "0",
        ])  # fmt: skip
    assert ended.value.code == 1
    assert "The reward of 'sum_digits'" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["act", "observe"])
def test_an_environment_that_calls_sys_exit_fails_its_episodes(tmp_path, method):
    task = Calculator()
    setattr(task, method, lambda *_: sys.exit(0))
    with pytest.raises(RewardError, match=r"'calculator'.*sys.exit\(0\) in " + method):
        funcrl.train(small(tmp_path / "run"), task=task)


@pytest.mark.parametrize("method", ["prompts", "eval_prompts"])
def test_a_task_that_calls_sys_exit_elsewhere_is_an_error(tmp_path, method):
    task = SumDigits()
    setattr(task, method, lambda *_: sys.exit(0))
    with pytest.raises(adapt.TaskError, match=r"'sum_digits' called sys.exit\(0\) in " + method):
        funcrl.train(small(tmp_path / "run"), task=task)


class Undecodable(CharTokenizer):
    def __init__(self, alphabet, error):
        super().__init__(alphabet)
        self.error = error

    def decode(self, tokens):
        raise self.error


@pytest.mark.parametrize("stop", [(), ("9",)], ids=["reads", "draws"])
@pytest.mark.parametrize("error", [KeyError(99), SystemExit(0)], ids=["raises", "exits"])
def test_decode_that_fails_names_the_tasks_tokenizer(tmp_path, error, stop):
    task = SumDigits()
    task.tokenizer = Undecodable("0123456789+=", error)
    sampling = Sampling(max_tokens=3, stop=stop)
    with pytest.raises(adapt.TaskError, match="tokenizer of the task 'sum_digits' raised.*decode"):
        funcrl.train(small(tmp_path / "run", sampling=sampling), task=task)


def test_a_reward_that_changes_the_directory_does_not_move_the_run(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    run = runs.Path("run")
    trained = funcrl.train(small(run), task=Meddling(lambda: os.chdir(tmp_path / "elsewhere")))
    assert runs.Path.cwd() == tmp_path / "elsewhere"
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert [row["step"] for row in runs.read_lines(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2]
    found, _ = funcrl.restore(tmp_path / "run" / "checkpoints", like=trained.state)
    assert equal(found, trained.state)
    assert "run_dir: run\n" in (tmp_path / "run" / "config.yaml").read_text()


def test_a_reward_that_changes_the_directory_does_not_move_an_evaluation(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    options = config.EvalConfig(
        model="micro", num_prompts=9, max_tokens=3, out=runs.Path("rows.jsonl"),
        json=runs.Path("result.json"),
    )  # fmt: skip
    funcrl.evaluate(options, task=Meddling(lambda: os.chdir(tmp_path / "elsewhere")))
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert (tmp_path / "result.json").exists()
    assert len(runs.read_lines(tmp_path / "rows.jsonl")) == 9


FORKING = """
import os, pathlib, sys
import funcrl
from funcrl.run.views import PlainView
from meddling import Meddling, small

children = []

def fork():
    if not children:
        child = os.fork()
        if child:
            children.append(os.waitpid(child, 0)[1])
        else:
            children.append(None)

options = small(pathlib.Path(sys.argv[1]), on_reward_error="skip", num_prompts=8, steps=3,
                max_staleness=int(sys.argv[2]))
funcrl.train(options, task=Meddling(fork), view=PlainView(sys.stdout))
print("finished in", "the child" if children == [None] else "the parent")
print("child", [os.waitstatus_to_exitcode(status) for status in children])
"""


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["1"])
def test_a_forked_child_that_returns_is_stopped(tmp_path, staleness):
    ended = subprocess.run(
        [sys.executable, "-c", FORKING, tmp_path / "run", staleness],
        capture_output=True, text=True, timeout=100, check=False,
        cwd=os.path.dirname(meddling.__file__),
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("finished in the parent") == 1
    assert "finished in the child" not in ended.stdout
    assert "child [0]" not in ended.stdout
    assert "forked a child in a reward" in ended.stderr
    assert "Saved step" not in ended.stdout
    rows = runs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2, 3]


FORKING_TASK = """
import os
from funcrl.tasks import SumDigits

class Forking(SumDigits):
    forked = False

    def reward(self, prompt, completion):
        if not Forking.forked:
            Forking.forked = True
            child = os.fork()
            if child:
                print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        return super().reward(prompt, completion)
"""


@pytest.mark.slow
@pytest.mark.parametrize("staleness", ["1"])
def test_a_forked_child_that_returns_ends_the_childs_command(tmp_path, staleness):
    (tmp_path / "forking.py").write_text(FORKING_TASK)
    ended = subprocess.run(
        [
            sys.executable, "-m", "funcrl", "train", "--task", "forking.py:Forking",
            "--run-dir", "run", "--steps", "2", "--warm-start.steps", "0",
            "--evaluation.every", "0", "--max-staleness", staleness,
        ],
        capture_output=True, text=True, timeout=100, cwd=tmp_path, check=False,
        env=os.environ | {
            "PYTHONPATH": os.path.dirname(os.path.dirname(funcrl.__file__)), "HOME": str(tmp_path),
        },
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("child 1\n") == 1
    assert ended.stdout.count("makes a page of it") == 1
    assert "forked a child in a reward" in ended.stderr
    assert "Traceback" not in ended.stderr
    rows = runs.read_lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]


ASYNC = FORKING.replace("Meddling(fork)", "Later(fork)").replace(
    "options =",
    """class Later(Meddling):
    async def reward(self, prompt, completion):
        return super().reward(prompt, completion)

options =""",
)


@pytest.mark.slow
def test_a_forked_child_that_returns_from_an_async_reward_is_stopped(tmp_path):
    ended = subprocess.run(
        [sys.executable, "-c", ASYNC, tmp_path / "run", "0"],
        capture_output=True, text=True, timeout=100, check=False,
        cwd=os.path.dirname(meddling.__file__),
    )  # fmt: skip
    assert ended.stdout.count("finished in the parent") == 1
    assert "finished in the child" not in ended.stdout
    assert "forked a child in a reward" in ended.stderr
