"""The warm start: what a task does wrong there is an error that names it."""

import pytest

import funcrl
from funcrl.config import WarmStartConfig
from funcrl.loop.rollouts.grade import RewardError
from funcrl.tasks import Calculator, SumDigits
from funcrl.tasks.adapt import TaskError


def warm_start(task):
    model = funcrl.models.Transformer(funcrl.models.shape("micro", task.tokenizer.vocab_size))
    funcrl.warm_start(
        funcrl.logprob_fn(model), funcrl.init_params(model, seed=0), task,
        WarmStartConfig(steps=1, num_prompts=2), seed=0, accuracy=lambda params: 0.0,
    )  # fmt: skip


def broken(kind, method):
    def raising(self, *args):
        raise KeyError("no such thing")

    return type("Broken", (kind,), {"name": "broken", method: raising})()


@pytest.mark.parametrize(
    ("kind", "method"),
    [(SumDigits, "demonstrate"), (Calculator, "demonstrate"), (Calculator, "begin"),
     (Calculator, "act"), (Calculator, "observe")],
)  # fmt: skip
def test_a_demonstration_that_raises_names_the_task_and_the_method(kind, method):
    with pytest.raises(
        TaskError, match=rf"'broken' raised KeyError.*{method}.*--warm-start\.steps"
    ):
        warm_start(broken(kind, method))


@pytest.mark.parametrize("kind", [SumDigits, Calculator])
def test_a_reward_that_raises_names_the_task(kind):
    with pytest.raises(RewardError, match="reward of 'broken' raised KeyError"):
        warm_start(broken(kind, "reward"))


@pytest.mark.parametrize("value", ["1", None, float("nan")])
def test_a_reward_that_is_no_number_is_named(value):
    class Worded(SumDigits):
        def reward(self, prompt, completion):
            return {"correct": value}

    with pytest.raises(RewardError, match="reward 'correct' of 'sum_digits' is"):
        warm_start(Worded())


@pytest.mark.parametrize("name", ["correct", "found"])
def test_a_demonstration_that_is_not_right_is_refused(name):
    class Named(SumDigits):
        accuracy = "" if name == "correct" else name

        def reward(self, prompt, completion):
            return {name: 0.5, "length": 0.0}

    with pytest.raises(ValueError, match=rf"are right.*'{name}' of 'sum_digits' is 0.5"):
        warm_start(Named())
