"""Runs on a file of rows with rewards of one's own: trained, resumed, evaluated, refused."""

import json

import pytest
import yaml
from cases import equal, run_command

import funcrl
from funcrl import runs
from funcrl.config import EvalConfig, EvaluationConfig, TrainConfig, WarmStartConfig, read_config
from funcrl.run import trust

REWARDS = """
import asyncio
import pathlib

pathlib.Path(__file__).with_suffix(".marker").touch()

async def score(prompt, completion, level):
    await asyncio.sleep(0.001 * (len(completion) % 3))
    return len(completion) % (2 + level)

def short(completions, **columns):
    return [-len(text) for text in completions]
"""
SMALL = [
    "--num-prompts", "2", "--num-generations", "2", "--warm-start.steps", "0",
    "--evaluation.num-prompts", "2", "--evaluation.every", "1", "--sampling.max-tokens", "2",
    "--optimizer.schedule", "constant", "--checkpoint.every", "1",
]  # fmt: skip


def write_rows(path, count=30):
    rows = [{"text": f"{n}", "answer": n % 7, "level": n % 2} for n in range(count)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path / "data.jsonl")
    (tmp_path / "mine.py").write_text(REWARDS)
    return tmp_path


def train(capsys, *args):
    rewards = [
        "--task", "data.jsonl", "--prompt-template", "{text}=", "--held-out", "0.3",
        "--reward", "mine.py:score", "mine.py:short", "--reward-weights", "short", "0.1",
    ]  # fmt: skip
    return run_command(["train", *rewards, *SMALL, *args], capsys)


def state_of(run, parts):
    return funcrl.restore(run / "checkpoints", like=funcrl.loop.build.empty_state(parts))[0]


def untimed(run):
    rows = runs.read_lines(run / "metrics.jsonl")
    return [{name: value for name, value in row.items() if "time" not in name} for row in rows]


@pytest.mark.slow
def test_a_run_on_a_file_is_resumed_to_the_same_bits_and_evaluated(place, capsys):
    assert train(capsys, "--steps", "2", "--run-dir", "whole").code == 0
    assert train(capsys, "--steps", "1", "--run-dir", "part").code == 0
    assert run_command(["train", "--resume", "part", "--steps", "2"], capsys).code == 0
    parts = funcrl.build(read_config(TrainConfig, place / "whole" / "config.yaml"))
    assert equal(state_of(place / "whole", parts), state_of(place / "part", parts))
    rows = untimed(place / "whole")
    assert untimed(place / "part") == rows
    assert {"rewards/score/mean", "rewards/short/mean"} < rows[1].keys()
    first = runs.read_lines(place / "whole" / "completions.jsonl")[0]
    assert first["prompt"].endswith("=")
    expected = len(first["completion"]) % (2 + int(first["prompt"][:-1]) % 2)
    assert first["rewards"] == {"score": expected, "short": -len(first["completion"])}
    assert first["reward"] == pytest.approx(expected - 0.1 * len(first["completion"]))
    held_out = {prompt.text for prompt in parts.task.eval_prompts(30)}
    assert 0 < len(held_out) < 30
    assert not held_out & {prompt.text for prompt in parts.task.prompts(0, 0, 60)}

    def asked(*args):
        out = place / f"out{len(args)}-{hash(args)}.jsonl"
        ended = run_command(["eval", *args, "--max-tokens", "2", "--out", out], capsys)
        assert ended.code == 0, ended.err
        return {row["prompt"] for row in runs.read_lines(out)}, ended.out

    assert asked("--run", "whole")[0] == held_out
    (place / "same.jsonl").write_bytes((place / "data.jsonl").read_bytes())
    reward = ("--reward", "mine.py:short")
    assert asked("--run", "whole", "--task", "same.jsonl", *reward)[0] == held_out
    write_rows(place / "other.jsonl", count=5)
    assert asked("--run", "whole", "--task", "other.jsonl")[0] == {f"{n}=" for n in range(5)}
    template = ("--prompt-template", "{answer}?", "--held-out", "1.0")
    assert asked("--task", "other.jsonl", *template, *reward)[0] == {f"{n}?" for n in range(5)}


@pytest.mark.slow
def test_rows_too_long_for_the_context_are_named_at_the_start_or_left_out(place, capsys):
    context = funcrl.models.shape("micro", vocab_size=257).context_length
    with (place / "data.jsonl").open("a") as file:  # with "=" as long as the context
        file.write(json.dumps({"text": "9" * (context - 1), "answer": 0, "level": 0}) + "\n")
    ended = train(capsys, "--steps", "1", "--run-dir", "run")
    assert (ended.code, (place / "run").exists()) == (1, False)
    assert f"fewer tokens than the {context} of" in ended.err
    assert f"got {context} in '999" in ended.err
    for limit, said in ((context - 1, "1."), (2, "21.")):  # of two digits and more with "=", or one
        options = ["--max-prompt-length", limit, "--run-dir", "run"]
        ended = train(capsys, "--steps", "2", *options)
        assert ended.code == 0, ended.err
        assert f"more than {limit} tokens: {said}" in ended.out
        ended = run_command(["eval", "--run", "run", "--out", f"{limit}.jsonl"], capsys)
        assert ended.code == 0, ended.err
        asked = {row["prompt"] for row in runs.read_lines(place / f"{limit}.jsonl")}
        drawn = {row["prompt"] for row in runs.read_lines(place / "run" / "completions.jsonl")}
        assert max(map(len, asked | drawn)) == min(limit, 3)
        (place / "run").rename(place / f"run{limit}")
    task = ["--task", "sum_digits"]
    ended = run_command(["train", *task, "--max-prompt-length", "2"], capsys)
    assert "funcrl: load expects --max-prompt-length 2 with a file of rows" in ended.err
    write_rows(place / "other.jsonl", count=12)
    other = ["--task", "other.jsonl", "--out", "other-answers.jsonl"]
    assert run_command(["eval", "--run", "run2", *other], capsys).code == 0
    assert len(runs.read_lines(place / "other-answers.jsonl")) == 12


@pytest.mark.slow
def test_rows_and_rewards_that_have_changed_are_refused(place, capsys):
    assert train(capsys, "--steps", "1", "--run-dir", "run").code == 0
    facts = runs.read_facts(place / "run")
    assert {"data_sha256", "reward_score_sha256", "reward_short_sha256"} <= facts.keys()
    assert "task_sha256" not in facts
    (place / "mine.py").write_text(REWARDS + "\n")
    for args in (["train", "--resume", "run", "--steps", "2"], ["eval", "--run", "run"]):
        ended = run_command(args, capsys)
        assert ended.code == 1
        assert "--trust" in ended.err
        assert "mine.py" in ended.err
    (place / "mine.py").write_text(REWARDS)
    write_rows(place / "data.jsonl", count=31)
    resumed = ["train", "--resume", "run", "--steps", "2", "--trust"]
    for args in (resumed, ["eval", "--run", "run"]):
        ended = run_command(args, capsys)
        assert ended.code == 1
        assert "train expects" in ended.err or "evaluate expects" in ended.err
        assert "data.jsonl to be as it was when" in ended.err
    with pytest.raises(ValueError, match="load_run expects .*as it was"):
        funcrl.load_run("run", note=print)
    assert run_command(["eval", "--run", "run", "--task", "data.jsonl"], capsys).code == 0


def test_a_strangers_rewards_are_not_run(place, capsys):
    config = {"task": "data.jsonl", "reward": ["mine.py:score"], "prompt_template": "{text}"}
    (place / "theirs.yaml").write_text(yaml.safe_dump(config))
    for args in ([], ["--dry-run"]):
        ended = run_command(["train", "--config", "theirs.yaml", *args], capsys)
        assert (ended.code == 0) == bool(args), ended.err
        assert not (place / "mine.marker").exists()
    assert "peak" in ended.out
    named = trust.named_code(read_config(TrainConfig, place / "theirs.yaml"))
    assert [code.option for code in named] == ["--reward mine.py:score"]


@pytest.mark.parametrize("option", ["task", "reward"])
@pytest.mark.parametrize("name", ["mine.py:score and more", "pypi:Name", "mine.py:"])
def test_no_name_gets_around_the_question_of_trust(place, capsys, option, name):
    (place / "pypi.py").write_text(REWARDS)
    value = [name] if option == "reward" else name
    (place / "theirs.yaml").write_text(yaml.safe_dump({option: value}))
    ended = run_command(["train", "--config", "theirs.yaml"], capsys)
    assert ended.code == 1
    assert name in ended.err
    assert not (place / "mine.marker").exists()
    assert not (place / "pypi.marker").exists()


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--task", "no.jsonl"], "load expects no.jsonl, got no such file"),
        (["--task", "data.jsonl"], "column prompt or a column messages in data.jsonl"),
        (["--prompt-template", "{text}"], "--prompt-template {text} with a file of rows"),
        (["--held-out", "0.5"], "--held-out 0.5 with a file of rows"),
        (["--reward", "mine.py:score", "./mine.py:score"], "'score' twice"),
        (["--reward", "mine.py:nothing"], "--reward mine.py:nothing to name an object"),
        (["--reward", "mine.py:score"], "'score' is expected to take .* 'level'"),
        (["--reward", "mine.py"], "--reward to be file.py:Name or module:Name, got 'mine.py'"),
        (["--held-out", "1.5"], "--held-out to be a number from 0 to 1"),
        (["--reward-timeout", "0"], "--reward-timeout to be a finite number above 0"),
    ],
)
def test_wrong_options_are_refused_before_any_work(place, capsys, args, message):
    ended = run_command(["train", "--run-dir", "run", *args], capsys)
    assert ended.code in (1, 2)
    printed = " ".join(ended.err.split())
    assert all(part in printed for part in message.split(" .* ")), printed
    assert not (place / "run" / "metrics.jsonl").exists()


def test_a_data_set_and_its_rewards_are_a_task_in_python(place):
    async def right(completion, answer):
        return completion == str(answer)

    rows = [{"prompt": f"{n}=", "answer": n} for n in range(20)]
    config = TrainConfig(
        run_dir=place / "run", steps=1, num_prompts=2, num_generations=2, reward=("mine.py:short",),
        warm_start=WarmStartConfig(steps=1, num_prompts=2), sampling=TrainConfig().sampling,
        evaluation=EvaluationConfig(num_prompts=2),
    )  # fmt: skip
    task = funcrl.tasks.from_rows(rows, right)
    trained = funcrl.train(config, task=task)
    assert {"rewards/right/mean", "rewards/short/mean"} < trained.history[1].keys()
    result = funcrl.evaluate(EvalConfig(run=place / "run", max_tokens=2), task=task, note=print)
    assert result.num_prompts == len(task.eval_prompts(100))
    with pytest.raises(ValueError, match="--held-out and splits with rows of data"):
        funcrl.build(TrainConfig(held_out=0.2), task=task)


def test_a_late_reward_is_skipped_or_stops_the_run(place, capsys):
    (place / "mine.py").write_text(
        "import asyncio\nasync def slow(completion):\n"
        "    await asyncio.sleep(60 * (len(completion) > 1))\n    return 1.0\n"
    )
    write = ["train", "--task", "data.jsonl", "--prompt-template", "{text}", *SMALL]
    write += ["--reward", "mine.py:slow", "--reward-timeout", "0.01", "--evaluation.every", "0"]
    ended = run_command([*write, "--steps", "1", "--run-dir", "run"], capsys)
    assert ended.code == 1
    assert "The reward 'slow' took longer than 0.01 s (--reward-timeout)" in ended.err
