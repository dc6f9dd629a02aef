"""Right answers in place of drawn ones: what supervised training and a warm start train on."""

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from funcrl.config import TrainConfig
from funcrl.core.types import Params, Rollout, Sample
from funcrl.loop.build import Parts
from funcrl.loop.episodes import Demonstration, demonstration
from funcrl.loop.rollouts.roll import Policy, Rolled, prompts_of
from funcrl.rl.batching import pad_rows
from funcrl.tasks.contracts import Prompt, Task

_Result = TypeVar("_Result")


class Answers:
    """The rollouts of a run that trains on the task's own answers: nothing is drawn."""

    older: Sequence[Params] = ()

    def __init__(self, config: TrainConfig, parts: Parts) -> None:
        self._config, self._parts = config, parts
        self._policies: list[Policy] = []  # the newest alone

    @property
    def newest(self) -> Policy:
        """The policy that was given last."""
        return self._policies[-1]

    def give(self, version: int, trained: Params) -> None:
        """Take what a step has trained, for an evaluation."""
        is_shared = not isinstance(self._parts.layout, tuple)
        self._policies = [Policy(version, trained, (), is_shared)]

    def take(self, index: int) -> Rolled:
        """Return the answers of a step's prompts."""
        config, task = self._config, self._parts.task
        rollout = answers_of(task, prompts_of(config, task, index), config.device)
        return Rolled(None, None, rollout, {}, self.newest)

    def run(self, job: Callable[[], _Result]) -> _Result:
        """Run the job."""
        return job()

    def close(self) -> None:
        """Do nothing."""


def answers_of(task: Task, prompts: Sequence[Prompt], device: torch.device | str) -> Rollout:
    """Return the answers that a task demonstrates as a rollout."""
    return to_rollout([demonstration(task, prompt) for prompt in prompts], device)


def to_rollout(rows: Sequence[Demonstration], device: torch.device | str) -> Rollout:
    """Return demonstrations as a rollout in which each earned 1."""
    length, count = max(len(row.tokens) for row in rows), len(rows)
    return Rollout(
        tokens=pad_rows([row.tokens for row in rows], torch.int64, device),
        mask=pad_rows([row.mask for row in rows], torch.bool, device),
        behavior_logprobs=torch.zeros(count, length, dtype=torch.float32, device=device),
        rewards=torch.ones(count, dtype=torch.float32, device=device),
        group=torch.arange(count, device=device),
        policy_version=torch.zeros(count, dtype=torch.int64, device=device),
    )


def cross_entropy(rollout: Rollout, score_fn: Callable[[Sample], torch.Tensor]) -> float:
    """Return the mean over an answer's tokens of their negative log-probabilities."""
    positions = torch.arange(rollout.tokens.shape[1], device=rollout.tokens.device)
    logprobs = score_fn(Sample(rollout.tokens, positions.expand_as(rollout.tokens)))
    return -logprobs[rollout.mask].to(torch.float64).mean().item()
