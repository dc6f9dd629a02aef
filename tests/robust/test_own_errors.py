"""What a stranger is told of a mistake in a file of their own: which line, and what is expected."""

from dataclasses import replace

import pytest
import torch
from cases import equal, run_command

import funcrl
from funcrl.config import EvaluationConfig, TrainConfig, WarmStartConfig
from funcrl.tasks import Prompt, SumDigits

LINE = "--steps 1 --num-prompts 2 --num-generations 2 --warm-start.steps 0 --evaluation.every 0"
FILE = """\
import funcrl, torch
from torch import nn
class Net(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.out = nn.Embedding(vocab_size, 4), nn.Linear(4, vocab_size)
        self.gru = nn.GRU(4, 4)
class Batched(Net):
    def forward(self, tokens):
        rows, length = tokens.shape
class Misspelt(Net):
    def forward(self, tokens):
        return self.out(embedded)
class Recurrent(Net):
    def forward(self, tokens):
        return self.out(self.gru(self.embed(tokens))[0])
class Made(funcrl.tasks.SumDigits):
    def __init__(self):
        int("three")
class Asked(funcrl.tasks.SumDigits):
    def prompts(self, seed, start, count):
        text, answer = "1+2="
class Opened(funcrl.tasks.SumDigits):
    def __init__(self):
        open("no.txt")
def two(rewards):
    low, high, = torch.zeros(3)
def own(**tunables):
    return funcrl.grpo(scale_rewards=funcrl.advantages.by_group(two), **tunables)
"""
SMALL = TrainConfig(
    steps=1, num_prompts=2, num_generations=2, warm_start=WarmStartConfig(steps=0),
    evaluation=EvaluationConfig(num_prompts=2),
)  # fmt: skip


@pytest.mark.parametrize(
    ("option", "line", "words"),
    [
        ("--task {}:Made", 19, "Your code raised ValueError: invalid literal for int()"),
        ("--task {}:Asked", 22, "Your code raised ValueError: too many values to unpack"),
        ("--task {}:Opened", 25, "Your code raised FileNotFoundError: [Errno 2]"),
        ("--algorithm.name {}:own", 27, "Your code raised ValueError: too many values to unpack"),
        (
            "--model {}:Batched",
            10,
            "one sample, without a batch axis. Batched raised ValueError",
        ),
        ("--model {}:Misspelt", 13, "axis. Misspelt raised NameError: name 'embedded' is not"),
    ],
)
def test_an_error_of_ones_own_code_is_one_with_its_file_and_line(
    tmp_path, capsys, option, line, words
):
    file = tmp_path / "own.py"
    file.write_text(FILE)
    run = ["--run-dir", tmp_path / "run"]
    ended = run_command(["train", *run, *LINE.split(), *option.format(file).split()], capsys)
    assert ended.code == 1
    assert words in ended.err
    assert f"({file}, line {line})" in ended.err
    assert "Traceback" not in ended.err


def test_an_error_that_funcrl_raises_of_ones_own_value_is_its_own(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text("import funcrl\ndef task():\n    return funcrl.tasks.SumDigits(0)\n")
    ended = run_command(["train", "--run-dir", tmp_path / "run", "--task", f"{file}:task"], capsys)
    assert ended.code == 1
    assert ended.err.startswith("funcrl: SumDigits expects")


def test_a_layer_that_vmap_cannot_run_is_refused_before_the_run(tmp_path, capsys):
    file = tmp_path / "own.py"
    file.write_text(FILE)
    run = ["--run-dir", tmp_path / "run"]
    ended = run_command(["train", *run, *LINE.split(), "--model", f"{file}:Recurrent"], capsys)
    assert ended.code == 1
    assert ended.out == ""
    (line,) = ended.err.splitlines()
    assert "got nn.GRU at 'gru', which it cannot; write the recurrence as a loop" in line


def test_prompts_and_advantages_say_what_is_expected():
    class Pairs(SumDigits):
        def prompts(self, seed, start, count):
            return [("1+2=", "3")] * count

    task = funcrl.build(SMALL, Pairs()).task
    with pytest.raises(ValueError, match=r"prompts\(\) of .* funcrl.tasks.Prompt.*got \('1\+2='"):
        task.prompts(0, 0, 2)
    assert task.eval_prompts(1)[0].text

    def mean(rewards):
        return rewards.mean()

    with pytest.raises(ValueError, match=r"by_group expects mean to return .*\[G\].*got \[\] of 2"):
        funcrl.advantages.by_group(mean)(torch.ones(4), torch.tensor([0, 0, 1, 1]))


@pytest.mark.parametrize(
    ("value", "words", "skips"),
    [("yes", "is 'yes', expected a number, for", False),
     (None, r"is None, expected a number \(is a return missing\?\), for", False),
     (float("nan"), "is nan for", True)],
)  # fmt: skip
def test_a_reward_that_is_no_number_says_so(value, words, skips):
    class Own(SumDigits):
        def reward(self, prompt, completion):
            return {"correct": value}

    with pytest.raises(ValueError, match=words) as raised:
        funcrl.rollouts.grade(Own(), [Prompt("1+2=", "3")], ["3"])
    assert ("--on-reward-error skip" in str(raised.value)) == skips


def test_train_takes_the_parts_that_build_takes(tmp_path, capsys):
    config, task = replace(SMALL, run_dir=tmp_path / "run"), SumDigits()
    size = task.tokenizer.vocab_size
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Embedding(size, 8), torch.nn.Linear(8, size))
    parts = funcrl.build(config, task=task, model=net)
    trained = funcrl.train(config, task=task, model=net)
    other, new = (replace(config, run_dir=tmp_path / name) for name in ("other", "new"))
    assert equal(trained.state, funcrl.train(other, parts=parts).state)
    assert funcrl.train(config, task=task, model=net, resume=True).history
    with pytest.raises(ValueError, match="train expects model= or parts=.*got both"):
        funcrl.train(new, parts=parts, model=net)
    with pytest.raises(TypeError, match="train expects task, model, .*got 'net'"):
        funcrl.train(new, net=net)
    assert not new.run_dir.exists()

    # The run has objects, which a command cannot make: said at once, with what to write instead.
    ended = run_command(["eval", "--run", config.run_dir], capsys)
    assert ended.code == 1
    assert "with task and model" in ended.err
    assert "funcrl.evaluate(config, parts=parts) can, with parts = funcrl.build(" in ended.err
    with pytest.raises(ValueError, match="load_run expects parts=, with task and model"):
        funcrl.load_run(config.run_dir)
    assert funcrl.load_run(config.run_dir, parts=parts).model is net
