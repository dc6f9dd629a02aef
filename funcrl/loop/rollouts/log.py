"""What a run writes down of its completions, and of what reward functions have logged."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from funcrl.config import TrainConfig
from funcrl.core import numerics
from funcrl.core.arguments import checked
from funcrl.core.types import Algorithm, Params, Rollout
from funcrl.loop.build import Parts
from funcrl.loop.rollouts.draw import Completed
from funcrl.loop.rollouts.grade import Graded, worth_of
from funcrl.loop.rollouts.roll import Rolled, rows_of, whole_trained
from funcrl.models.logprobs import score
from funcrl.rl.batching import pad_length
from funcrl.run.runs import Completion


@checked
def to_completions(
    completed: Completed, graded: Graded, step: int, count: int, advantages: Tensor | None = None
) -> list[Completion]:
    """Return the first `count` completions as lines of completions.jsonl.

    Args:
        completed: B completions.
        graded: their rewards.
        step: of the run.
        count: how many; all of them where there are fewer.
        advantages: [B], NaN for a completion that is not trained on; none are recorded when left
            out.

    Example:
        >>> import funcrl
        >>> parts = funcrl.build(funcrl.config.TrainConfig())
        >>> parts.generator.push(funcrl.init_params(parts.model, seed=0))
        >>> prompts = parts.task.prompts(seed=0, start=0, count=2)
        >>> completed = funcrl.rollouts.complete(
        ...     parts.task, parts.generator, prompts, parts.sampling, seed=0)
        >>> graded = funcrl.rollouts.grade(parts.task, completed.prompts, completed.outcomes)
        >>> len(funcrl.rollouts.to_completions(completed, graded, step=3, count=1))
        1
    """
    unknown = [math.nan] * len(completed.texts)
    known = unknown if advantages is None else advantages.tolist()
    return [
        Completion(
            step=step,
            prompt=completed.prompts[row].text,
            completion=completed.texts[row],
            answer=completed.prompts[row].answer,
            reward=graded.total[row].item(),
            rewards={name: values[row].item() for name, values in graded.rewards.items()},
            finish_reason=completed.samples.finish_reasons[row],
            policy_version=completed.samples.policy_version,
            advantage=None if math.isnan(known[row]) else known[row],
            extra=(dict(graded.extra[row]) or None) if graded.extra else None,
        )
        for row in range(min(count, len(completed.texts)))
    ]


_MOST_TOKENS = 512  # of a completion whose tokens are written down one by one


def advantages_of(
    algorithm: Algorithm, completed: Completed, graded: Graded, rollout: Rollout | None
) -> Tensor:
    """Return the advantages [B] of a step's completions; NaN for one that has none."""
    total = worth_of(algorithm, graded, completed.group_size)
    advantages = torch.full_like(total, torch.nan)
    if rollout is not None and algorithm.weight != ():
        rewards = rollout.rewards.to(numerics.at_least_float32(rollout.rewards.dtype))
        found: object = algorithm.advantage(rewards, rollout.group)
        # What is no number for each row is refused by the step, by name.
        if isinstance(found, Tensor) and found.shape == rewards.shape:
            found = torch.where(rollout.mask.any(dim=1), found, torch.nan)
            advantages[total.isfinite()] = found.to(advantages)
    return advantages


def tokens_of_first(
    parts: Parts, params: Params, completed: Completed, rollout: Rollout | None, multiple: int
) -> dict[str, Any]:
    """Return the fields of a `Completion` about the tokens of a step's first completion.

    The trainer's log-probabilities are those before the step's update, with the parameters that
    the generator had. There are none where the rollout begins with another completion.
    """
    prompt, sampled = completed.prompt_tokens[0], completed.samples.mask[0].nonzero()
    if rollout is None or not len(sampled):
        return {}
    count = min(int(sampled[-1]) + 1, _MOST_TOKENS)
    tokens = completed.samples.tokens[0, :count].tolist()
    part = slice(len(prompt), len(prompt) + count)
    if rollout.tokens[0, : part.stop].tolist() != prompt + tokens:
        return {}
    first = pad_length(Rollout(*(leaf[:1] for leaf in rollout)), multiple)
    scores = score(parts.model_fn, params, rows_of(first.tokens))
    mask = completed.samples.mask[0, :count].tolist()

    def known(values: Tensor) -> list[float | None]:
        both = zip(values[0, part].tolist(), mask, strict=True)
        return [value if is_sampled else None for value, is_sampled in both]

    return {
        "tokens": [parts.task.tokenizer.decode([token]) for token in tokens],
        "logprobs": known(first.behavior_logprobs),
        "trainer_logprobs": known(scores.logprobs),
    }


def completions_to_record(
    config: TrainConfig, parts: Parts, rolled: Rolled, index: int
) -> list[Completion]:
    """Return the completions to record: some of the first prompts, every few steps."""
    completed, graded, rollout, _, policy = rolled
    if completed is None or graded is None:
        return []
    advantages = advantages_of(parts.algorithm, completed, graded, rollout)
    if index != 1 and index % config.log.completions_every and index != config.steps:
        return to_completions(completed, graded, index, 1, advantages)
    rows = to_completions(completed, graded, index, config.log.num_completions, advantages)
    trained, multiple = whole_trained(parts, policy), config.length_multiple
    tokens = tokens_of_first(parts, trained, completed, rollout, multiple)
    return [rows[0]._replace(**tokens), *rows[1:]]


def with_logged(row: dict[str, Any], logged: Mapping[str, float]) -> dict[str, Any]:
    """Return a row of metrics, with those that reward functions have logged."""
    both = row.keys() & logged.keys()
    if both:
        raise ValueError(
            f"log_metric expects a name that no metric of a run has, got {min(both)!r}."
        )
    return {**row, **logged}
