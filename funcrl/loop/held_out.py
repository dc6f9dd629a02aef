"""Evaluation during a run: what a policy makes of prompts that it is not trained on."""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from funcrl.config import TrainConfig
from funcrl.core import rng
from funcrl.core.types import Params
from funcrl.loop.build import Parts
from funcrl.loop.rollouts.grade import is_accuracy, judging_reward
from funcrl.loop.rollouts.log import to_completions, with_logged
from funcrl.loop.rollouts.ranks import draw_and_grade
from funcrl.loop.rollouts.roll import EVALUATION
from funcrl.loop.supervised import answers_of
from funcrl.loop.update import scored
from funcrl.rl.batching import pad_length
from funcrl.run.accuracy import named_mean
from funcrl.run.runs import Completion
from funcrl.tasks.contracts import Prompt


class Evaluated(NamedTuple):
    """What a policy makes of prompts that are not trained on, if there are any."""

    row: dict[str, float]
    seen: list[Completion]


def evaluated(
    config: TrainConfig, parts: Parts, policy: Params, index: int, prompts: Sequence[Prompt]
) -> Evaluated:
    """Return the metrics and some completions of a policy on prompts that are not trained on.

    They are an accuracy where the reward that judges is right or wrong, else its mean by its name.
    """
    start = time.perf_counter()
    if not prompts:
        return Evaluated({}, [])
    parts.generator.push(policy, index)
    sampling = replace(parts.sampling, num_samples=1, temperature=config.evaluation.temperature)
    seed = rng.fold_in(config.seed, EVALUATION)
    completed, graded, _ = draw_and_grade(config, parts, prompts, sampling, seed, index)
    name = judging_reward(parts.task, graded)
    judged = graded.rewards[name]
    mean = judged.nanmean().item()  # of those with one
    is_right_or_wrong = is_accuracy(parts.task, name, judged)
    row = {
        **({"eval/accuracy": mean} if is_right_or_wrong else {named_mean(name): mean}),
        "eval/reward": graded.total.nanmean().item(),
        "eval/num_prompts": len(prompts) - len(graded.errors),
        "time/eval": time.perf_counter() - start,
    }
    row = with_logged(row, {f"eval/{name}": value for name, value in graded.metrics.items()})
    return Evaluated(row, to_completions(completed, graded, index, config.log.num_completions))


def eval_loss(
    config: TrainConfig, parts: Parts, trained: Params, prompts: Sequence[Prompt]
) -> dict[str, float]:
    """Return the mean negative log-probability of a token of the held-out prompts' own answers."""
    if not prompts:
        return {}
    rollout = pad_length(answers_of(parts.task, prompts, config.device), config.length_multiple)
    # A held-out row may be longer than a packed one.
    padded = replace(config, packing="none", pack_length=None, pack_rows=1)
    logprobs = scored(padded, parts, trained, rollout)[rollout.mask]
    return {"eval/loss": -logprobs.to(torch.float64).mean().item()}
