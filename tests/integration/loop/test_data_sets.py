"""Data sets by name, rows in Python, named columns, and rewards that judge some completions."""

import json
import math
from dataclasses import replace

import datasets
import pytest
import torch
from cases import TEMPLATES, run_command, tiny_pretrained, tiny_tokenizer

import funcrl
from funcrl.config import EvalConfig, EvaluationConfig, Sampling, TrainConfig, WarmStartConfig
from funcrl.tasks import from_rows, load

ROWS = [{"question": f"{a}+{b}=", "result": a + b, "level": a} for a in range(5) for b in range(5)]
CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""
SMALL = TrainConfig(
    steps=2, num_prompts=4, num_generations=2, warm_start=WarmStartConfig(steps=1, num_prompts=2),
    sampling=Sampling(max_tokens=3), evaluation=EvaluationConfig(every=1, num_prompts=5),
)  # fmt: skip
COLUMNS = ["--prompt-column", "question", "--answer-column", "result"]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder in the form of a hub's data set, in the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    folder = tmp_path / "org" / "sums"
    (folder / "main").mkdir(parents=True)
    for split, rows in (("train", ROWS[:20]), ("test", ROWS[20:])):
        path = folder / "main" / f"{split}-00000-of-00001.parquet"
        datasets.Dataset.from_list(rows).to_parquet(path)
    (folder / "README.md").write_text(CARD)
    return tmp_path


def test_a_data_set_is_trained_on_by_its_name(place, capsys):
    options = ["--steps", "2", "--num-prompts", "4", "--num-generations", "2", "--warm-start.steps",
               "1", "--evaluation.every", "1", "--sampling.max-tokens", "3"]  # fmt: skip
    ended = run_command(
        ["train", "--task", "org/sums:main", "--test-split", "test", *COLUMNS, *options], capsys
    )
    assert ended.code == 0, ended.err
    run = place / "runs" / "sums-1"
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["eval/num_prompts"] for row in rows] == [5, 5, 5]
    resumed = run_command(["train", "--resume", run, "--steps", "3"], capsys)
    assert resumed.code == 0, resumed.err
    found = run_command(["eval", run], capsys)
    assert "sums, " in found.out
    assert "5 prompts" in found.out
    # All rows of a split that the run was not trained on.
    other = run_command(["eval", run, "--task", "org/sums:main", "--test-split", "train"], capsys)
    assert "20 prompts" in other.out
    # Another set by the same name is another run.
    path = place / "org" / "sums" / "main" / "train-00000-of-00001.parquet"
    datasets.Dataset.from_list(ROWS[:19]).to_parquet(path)
    changed = run_command(["train", "--resume", run, "--steps", "4"], capsys)
    assert changed.code == 1
    assert "org/sums:main to be as it was when" in changed.err


def test_its_prompts_and_answers_are_the_columns_that_are_named(place):
    task = load(
        "org/sums:main", prompt_column="question", answer_column="result", test_split="test"
    )
    prompts = task.prompts(seed=0, start=0, count=20)
    assert sorted(each.text for each in prompts) == sorted(row["question"] for row in ROWS[:20])
    assert {each.text for each in task.eval_prompts(9)} == {row["question"] for row in ROWS[20:]}
    for prompt in prompts:
        assert eval(prompt.text.rstrip("=")) == int(prompt.answer) == prompt.data["result"]
        assert task.reward(prompt, prompt.answer) == {"correct": 1.0}
    held = load("org/sums:main", prompt_column="question", answer_column="result", held_out=0.3)
    assert 0 < len(held.eval_prompts(99)) < 20


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prompt-column", "text"], "--prompt-column to be a column of train of org/sums"),
        ([*COLUMNS[:3], "level2"], "--answer-column to be a column of train of org/sums"),
        ([*COLUMNS, "--prompt-template", "{level}"], "--prompt-column or --prompt-template, got"),
        ([*COLUMNS, "--split", "valid"], "with a split 'valid', got 'org/sums' with 'main'"),
        (["--task", "org/sums:other", *COLUMNS], "got 'org/sums' with 'other'"),
        (["--task", "rows.jsonl", "--split", "test"], "--split and --test-split with a data set"),
        (["--task", "sum_digits", "--answer-column", "x"], "--answer-column x with a file of rows"),
    ],
)
def test_what_is_not_there_is_said_before_any_work(place, capsys, args, message):
    (place / "rows.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n')
    task = [] if "--task" in args else ["--task", "org/sums:main"]
    ended = run_command(["train", *task, "--run-dir", "run", *args], capsys)
    assert ended.code == 1
    assert message in " ".join(ended.err.split()), ended.err
    assert not (place / "run").exists()


@pytest.mark.parametrize("name", ["--num-train-epochs", "--epochs"])
def test_epochs_are_steps_of_rows(place, capsys, name):
    line = ["train", "--task", "org/sums:main", "--test-split", "test", *COLUMNS, "--dry-run"]
    ended = run_command([*line, name, "1.5", "--num-prompts", "7"], capsys)
    assert "\nsteps: 5\n" in ended.out  # 1.5 * 20 / 7 = 4.3
    for args, message in (
        ([*line, name, "0"], "--num-train-epochs to be a finite number above 0"),
        ([*line, name, "1", "--steps", "3"], "--steps or --num-train-epochs, got both"),
        (["train", name, "1"], "with rows of data, a file or a data set as --task"),
    ):
        ended = run_command(args, capsys)
        assert ended.code == 1
        assert message in " ".join(ended.err.split())


def test_columns_of_messages_and_of_files(place):
    tokenizer = tiny_tokenizer(TEMPLATES["chatml"])
    talk = [{"role": "user", "content": "1+1="}]
    rows = [{"talk": talk, "messages": [], "prompt": "x", "answer": "2"}]
    task = from_rows(rows, tokenizer=tokenizer, prompt_column="talk", held_out=0.0)
    (prompt,) = task.prompts(0, 0, 1)
    assert prompt.text == tokenizer.render(talk)
    (place / "rows.jsonl").write_text(json.dumps({"q": "1+1=", "a": 2}) + "\n")
    task = load("rows.jsonl", prompt_column="q", answer_column="a", held_out=0.0)
    (prompt,) = task.prompts(0, 0, 1)
    assert (prompt.text, prompt.answer) == ("1+1=", "2")


@pytest.mark.parametrize("kind", [list, datasets.Dataset.from_list])
def test_rows_are_a_task_as_they_are(tmp_path, kind):
    rows = kind(ROWS)

    def right(completion, result):
        return float(completion == str(result))

    config = replace(
        SMALL, run_dir=tmp_path / "run", prompt_column="question", answer_column="result"
    )
    trained = funcrl.train(config, task=rows)
    task = from_rows(rows, prompt_column="question", answer_column="result")
    other = funcrl.train(replace(config, run_dir=tmp_path / "other", prompt_column=None,
                                 answer_column=None), task=task)  # fmt: skip
    for name, leaf in trained.state.params.items():
        assert torch.equal(leaf, other.state.params[name])
    more = replace(config, steps=3)
    assert len(funcrl.train(more, task=rows, resume=True).history) == 4
    result = funcrl.evaluate(EvalConfig(run=tmp_path / "run"), task=rows, note=print)
    assert result.num_prompts == len(task.eval_prompts(100))
    with pytest.raises(ValueError, match="^train expects --split and --test-split with the name"):
        funcrl.train(replace(config, run_dir=tmp_path / "x", test_split="test"), task=rows)
    with pytest.raises(ValueError, match="^build expects --prompt-column to be a column of rows"):
        funcrl.build(replace(config, prompt_column="text"), rows, function="build")


def test_rows_get_the_models_own_tokenizer(tmp_path):
    folder, _ = tiny_pretrained(tmp_path / "model", TEMPLATES["chatml"])
    config = replace(SMALL, model=str(folder), warm_start=WarmStartConfig(steps=0))
    rows = [{"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2=", "answer": "3"}]
    parts = funcrl.build(replace(config, system_prompt="Be brief."), rows)
    assert "Be brief." in parts.task.tokenizer.render([{"role": "user", "content": "x"}])


def of_even(prompts, completions, level, **_):
    """Judges what it is for, as TRL's functions for several tasks do."""
    return [1.0 if n % 2 == 0 else None for n in level]


def always(completion):
    return float(len(completion))


def of_odd(level):
    return None if level % 2 == 0 else 2.0


def test_a_reward_of_none_does_not_judge(tmp_path):
    rows = [{"prompt": f"{n}=", "level": n} for n in range(4)]
    task = from_rows(rows, [of_even, of_odd, always], held_out=0.0)
    prompts = sorted(task.prompts(0, 0, 4))
    graded = funcrl.rollouts.grade(task, prompts, ["", "a", "", "a"], weights={"of_odd": 0.5})
    assert graded.total.tolist() == [1.0, 2.0, 1.0, 2.0]
    assert graded.rewards["of_even"].nan_to_num(-1).tolist() == [1.0, -1.0, 1.0, -1.0]
    assert not graded.errors
    numbers = funcrl.metrics.describe_rollout(
        funcrl.Rollout(
            torch.zeros(4, 2, dtype=torch.int64), torch.ones(4, 2, dtype=torch.bool),
            torch.zeros(4, 2), graded.total, torch.tensor([0, 0, 1, 1]), torch.zeros(4).long(),
        ),
        {**graded.rewards, "none": torch.full((4,), math.nan)},
    )  # fmt: skip
    assert (numbers["rewards/of_even/mean"], numbers["rewards/of_odd/mean"]) == (1.0, 2.0)
    assert "rewards/none/mean" not in numbers
    config = replace(SMALL, run_dir=tmp_path / "run", warm_start=WarmStartConfig(steps=0))
    history = funcrl.train(config, task=from_rows(rows, [of_even, of_odd, always])).history
    assert all(math.isfinite(row["reward"]) for row in history[1:])


def test_a_completion_that_nothing_judges_is_an_error():
    rows = [{"prompt": f"{n}=", "level": n} for n in range(2)]
    task = from_rows(rows, [of_even], held_out=0.0)
    prompts = sorted(task.prompts(0, 0, 2))
    with pytest.raises(ValueError, match=r"'of_even' of 'rows' is None, .* return missing"):
        funcrl.rollouts.grade(task, prompts, ["", ""])


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """As verl documents it, with numbers beside the score."""
    return {"score": float(solution_str == ground_truth), "length": 7, "pred": solution_str}


def test_verls_scores_are_rewards_without_what_is_beside_them():
    rows = [{"prompt": "1+1=", "data_source": "x", "reward_model": {"ground_truth": "2"}}]
    task = from_rows(rows, compute_score, held_out=0.0)
    graded = funcrl.rollouts.grade(task, task.prompts(0, 0, 2), ["2", "3"])
    assert {name: each.tolist() for name, each in graded.rewards.items()} == {
        "compute_score": [1.0, 0.0]
    }


THINKING = (
    TEMPLATES["chatml"] + "{% if enable_thinking is defined and not enable_thinking %}"
    "<think></think>{% endif %}"
)


def test_thinking_is_switched_where_the_template_reads_it(tmp_path, capsys):
    folder, _ = tiny_pretrained(tmp_path / "model", THINKING)
    config = replace(
        SMALL, model=str(folder), task="countdown", warm_start=WarmStartConfig(steps=0)
    )
    ends = {}
    for thinking in (None, True, False):
        parts = funcrl.build(replace(config, enable_thinking=thinking))
        tokens = parts.task.tokenizer.encode("x")
        ends[thinking] = parts.task.tokenizer.inner.decode(tokens).endswith("<think></think>")
    assert ends == {None: False, True: False, False: True}
    given = ["generate", "--model", folder, "--max-tokens", "1", "--enable-thinking"]
    assert run_command([*given, "False", "hi"], capsys).code == 0
    plain, _ = tiny_pretrained(tmp_path / "plain", TEMPLATES["chatml"])
    ended = run_command(["train", "--model", plain, "--task", "countdown", "--enable-thinking",
                         "False", "--run-dir", tmp_path / "run"], capsys)  # fmt: skip
    assert ended.code == 1
    assert "a chat template that reads enable_thinking, got one that does not" in ended.err
    ended = run_command(["train", "--enable-thinking", "True", "--run-dir", tmp_path / "r"], capsys)
    assert ended.code == 1
    assert "--enable-thinking with a pretrained model" in ended.err
