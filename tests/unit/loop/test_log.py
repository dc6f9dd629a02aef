"""What a run writes down about its completions: each step's advantages, and tokens of a few."""

import pytest
import torch

import funcrl
from funcrl import runs
from funcrl.config import (
    AlgorithmConfig,
    EvaluationConfig,
    LogConfig,
    Sampling,
    TrainConfig,
    WarmStartConfig,
)
from funcrl.core.types import Rollout
from funcrl.loop.rollouts.draw import Completed
from funcrl.loop.rollouts.grade import Graded
from funcrl.loop.rollouts.log import advantages_of, tokens_of_first
from funcrl.run.runs import Completion
from funcrl.tasks import Prompt, SumDigits


class Length(SumDigits):
    """Rewards long answers, so that even a policy from nothing has differences."""

    def reward(self, prompt, completion):
        return {"correct": float(len(completion))}


@pytest.mark.slow
def test_a_step_records_advantages_and_a_few_completions_tokens(tmp_path):
    config = TrainConfig(
        run_dir=tmp_path / "run", steps=3, num_prompts=1, num_generations=4,
        sampling=Sampling(max_tokens=3), warm_start=WarmStartConfig(steps=0),
        evaluation=EvaluationConfig(every=0), algorithm=AlgorithmConfig(name="dr_grpo", kl=0.0),
        log=LogConfig(completions_every=100, num_completions=4), length_multiple=16,
    )  # fmt: skip
    funcrl.train(config, task=Length())
    rows = runs.read_lines(tmp_path / "run" / "completions.jsonl")
    first = [row for row in rows if row["step"] == 1]
    mean = sum(row["reward"] for row in first) / 4
    for row in first:  # A_i = R_i - mean(R)
        assert row["advantage"] == pytest.approx(row["reward"] - mean, abs=1e-6)
    middle = [row for row in rows if row["step"] == 2]
    assert [row.keys() >= {"advantage"} for row in middle] == [True]
    with_tokens = [row for row in rows if "tokens" in row]
    assert with_tokens == [row for row in rows if row["step"] != 2][::4]
    for row in with_tokens:
        assert "".join(row["tokens"]) == row["completion"]
        # The sampler and the trainer score with the same parameters, those before the update.
        assert row["trainer_logprobs"] == pytest.approx(row["logprobs"], abs=1e-5)
        assert len(row["logprobs"]) == len(row["tokens"])


NAN = float("nan")


def test_a_completion_that_is_not_trained_on_has_no_advantage_and_no_tokens():
    mask = torch.tensor([[False, True], [False, True], [False, False]])  # the last was cut off
    rollout = Rollout(
        tokens=torch.tensor([[1, 5], [1, 6], [1, 7]]), mask=mask,
        behavior_logprobs=torch.zeros(3, 2), rewards=torch.tensor([1.0, 3.0, 2.0]),
        group=torch.zeros(3, dtype=torch.int64), policy_version=torch.zeros(3, dtype=torch.int64),
    )  # fmt: skip
    samples = funcrl.types.Samples(
        torch.tensor([[4], [5], [6], [7]]), torch.ones(4, 1, dtype=torch.bool), torch.zeros(4, 1),
        torch.zeros(4, 1), ("stop",) * 4, 0,
    )  # fmt: skip
    prompts = [Prompt("1=", "1")] * 4
    completed = Completed(prompts, [[1]] * 4, samples, [""] * 4, [""] * 4, [1] * 4, 4)
    graded = Graded({}, torch.tensor([NAN, 1.0, 3.0, 2.0]), ["the first failed"])
    found = advantages_of(funcrl.dr_grpo(), completed, graded, rollout)
    torch.testing.assert_close(found, torch.tensor([NAN, -1.0, 1.0, NAN]), equal_nan=True)
    assert advantages_of(funcrl.dr_grpo(), completed, graded, None).isnan().all()
    parts = funcrl.build(TrainConfig())
    assert tokens_of_first(parts, {}, completed, rollout, 1) == {}  # it begins with the second
    rows = funcrl.rollouts.to_completions(completed, graded, 1, 4, found)
    assert [row.advantage for row in rows] == [None, -1.0, 1.0, None]


def test_lines_of_an_older_run_are_still_completions(tmp_path):
    old = {"step": 1, "prompt": "1+2=", "completion": "3", "answer": "3", "reward": 1.0,
           "rewards": {"correct": 1.0}, "finish_reason": "stop", "policy_version": 0}  # fmt: skip
    assert Completion(**old).to_row() == old
