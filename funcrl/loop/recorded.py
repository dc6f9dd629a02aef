"""What a run writes down about its completions besides their texts and their rewards."""

from typing import Any

import torch
from torch import Tensor

from funcrl.core import numerics
from funcrl.core.types import Algorithm, Params, Rollout, Sample
from funcrl.loop.parts.build import Parts
from funcrl.loop.rollouts import Completed, Graded, comparable
from funcrl.models.logprobs import score
from funcrl.rl.batching import pad_length

_MOST_TOKENS = 512  # of a completion whose tokens are written down one by one


def advantages_of(
    algorithm: Algorithm, completed: Completed, graded: Graded, rollout: Rollout | None
) -> Tensor:
    """Return the advantages [B] of a step's completions; NaN for one that is not trained on.

    Args:
        algorithm: whose advantage to take.
        completed: B completions.
        graded: their rewards.
        rollout: of those that can be compared, in their order; None where there are none.
    """
    total = comparable(graded.total, completed.group_size)
    advantages = torch.full_like(total, torch.nan)
    if rollout is not None:
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

    Args:
        parts: of the run.
        params: that the generator drew with.
        completed: the completions.
        rollout: of those that can be compared.
        multiple: rows are padded to a multiple of this length, as in the update.
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
    positions = torch.arange(first.tokens.shape[1], device=first.tokens.device)[None]
    scores = score(parts.model_fn, params, Sample(first.tokens, positions))
    mask = completed.samples.mask[0, :count].tolist()

    def known(values: Tensor) -> list[float | None]:
        both = zip(values[0, part].tolist(), mask, strict=True)
        return [value if is_sampled else None for value, is_sampled in both]

    return {
        "tokens": [parts.task.tokenizer.decode([token]) for token in tokens],
        "logprobs": known(first.behavior_logprobs),
        "trainer_logprobs": known(scores.logprobs),
    }
