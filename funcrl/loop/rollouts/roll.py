"""The rollout of a step: drawn, rewarded, and put into rows where it can be compared."""

import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from funcrl.config import TrainConfig
from funcrl.core import rng, tree
from funcrl.core.types import Absent, Params, Rollout, Sample
from funcrl.loop.build import Parts, whole_params
from funcrl.loop.from_config import compute_dtype
from funcrl.loop.rollouts.draw import Completed, to_rollout
from funcrl.loop.rollouts.grade import Graded, punish_overlong, worth_of
from funcrl.loop.rollouts.ranks import draw_and_grade
from funcrl.rl import metrics
from funcrl.rl.batching import mask_truncated
from funcrl.tasks.contracts import Environment, Prompt, Task

# Numbers that the run's seed is folded with, so that no two uses draw the same random numbers.
PROMPTS, DRAWS, ORDER, WARM_START, EVALUATION = range(1, 6)  # 0 is for new weights


class Policy(NamedTuple):
    """A policy of a run."""

    version: int  # the number of steps that it has learned from
    trained: Params  # parameters, or adapters
    params: Params | Absent  # to generate with; absent where they were pushed and not kept
    is_shared: bool = False  # whether `trained` is this rank's shards


def whole_trained(parts: Parts, policy: Policy) -> Params:
    """Return the whole parameters, or adapters, of a policy; all ranks call it."""
    return whole_params(parts, policy.trained) if policy.is_shared else policy.trained


def whole_policy(parts: Parts, policy: Policy) -> Params:
    """Return the whole parameters to generate with; all ranks call it."""
    if not isinstance(policy.params, tuple):
        return policy.params
    trained, dtype = policy.trained, compute_dtype(parts.config)
    casts = parts.lora is None and "generator" not in parts.replaced
    if casts and dtype is not None and parts.config.numerics == "native":
        trained = tree.cast(trained, dtype)  # as the generator does: half as much is sent
    return parts.policy(whole_trained(parts, policy._replace(trained=trained)))


class Rolled(NamedTuple):
    """The completions of one step, their rewards and their metrics."""

    completed: Completed | None  # None where nothing was drawn
    graded: Graded | None
    rollout: Rollout | None  # None where no completion has another one to be compared with
    numbers: dict[str, float]
    policy: Policy  # that drew them


def prompts_of(config: TrainConfig, task: Task, index: int) -> Sequence[Prompt]:
    """Return the prompts of a step."""
    first = (index - 1) * config.num_prompts
    prompts = task.prompts(rng.fold_in(config.seed, PROMPTS), first, config.num_prompts)
    if len(prompts) != config.num_prompts:
        raise ValueError(
            f"train expects {config.num_prompts} prompts (--num-prompts) from the task "
            f"{task.name!r} from number {first} on, got {len(prompts)}."
        )
    return prompts


def rows_of(tokens: torch.Tensor) -> Sample:
    """Return a rollout's rows [B, T] as a model function reads them."""
    positions = torch.arange(tokens.shape[1], device=tokens.device)
    return Sample(tokens, positions.expand_as(tokens))


def roll(config: TrainConfig, parts: Parts, index: int, policy: Policy) -> Rolled:
    """Return the rollout of a step, drawn and rewarded."""
    start = time.perf_counter()
    prompts = prompts_of(config, parts.task, index)
    seed = rng.fold_in(config.seed, DRAWS, index)
    completed, graded, generate = draw_and_grade(
        config, parts, prompts, parts.sampling, seed, index - 1
    )
    generated = start + generate
    if config.overlong:
        most = config.sampling.max_tokens * parts.task.max_turns
        lengths = completed.samples.mask.sum(dim=1).cpu()
        graded = punish_overlong(graded, lengths, most, config.overlong)
    rollout, numbers = _compared(config, parts, completed, graded)
    if isinstance(parts.task, Environment) or hasattr(parts.task, "play_episodes"):
        numbers["completions/mean_turns"] = sum(completed.turns) / len(completed.turns)
    if graded.errors:
        numbers["num_reward_errors"] = len(graded.errors)
    numbers |= {"time/generate": generate, "time/reward": time.perf_counter() - generated}
    return Rolled(completed, graded, rollout, numbers, policy)


def left_out(rolled: Rolled, index: int) -> Iterator[str]:
    """Yield lines that say which completions of a step are not trained on."""
    errors = rolled.graded.errors if rolled.graded is not None else []
    if errors:
        yield f"Step {index} left out {len(errors)}: {errors[0]}"
    if rolled.rollout is None:
        yield f"Step {index} trains on nothing: no group has two completions with a reward."


def _compared(
    config: TrainConfig, parts: Parts, completed: Completed, graded: Graded
) -> tuple[Rollout | None, dict[str, float]]:
    """Return the rollout of the completions that are trained on, if any, and metrics of rewards.

    All of them are, if the algorithm has no policy gradient and needs no reward.
    """
    total = worth_of(parts.algorithm, graded, completed.group_size)
    reasons = completed.samples.finish_reasons
    cut = torch.tensor([reason == "length" for reason in reasons], device=total.device)
    rollout, numbers, kept = None, {}, total.isfinite()
    if kept.any():
        rollout = to_rollout(completed, total)
        device = rollout.tokens.device
        named = {name: values[kept].to(device) for name, values in graded.rewards.items()}
        numbers = metrics.describe_rollout(rollout, named, cut[kept].to(device))
    if parts.algorithm.weight == () and not kept.all():
        rollout, kept = to_rollout(completed, total.nan_to_num()), torch.ones_like(kept)
    if rollout is not None and config.mask_truncated:
        rollout = mask_truncated(rollout, cut[kept].to(rollout.tokens.device))
    return rollout, numbers
