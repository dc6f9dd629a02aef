"""Completions and rewards over ranks: each rank draws and grades its own prompts."""

import time
from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from funcrl.config import Sampling, TrainConfig
from funcrl.core import tree
from funcrl.core.types import Samples
from funcrl.loop.build import Parts
from funcrl.loop.data import limits_of
from funcrl.loop.rollouts.draw import Completed, complete
from funcrl.loop.rollouts.grade import Graded, RewardedBatch, batch_rewards, graded_of
from funcrl.parallel import Axis, gather_objects
from funcrl.tasks.contracts import Prompt
from funcrl.tasks.rewards import TrainerState

_Value = TypeVar("_Value")


class _Share(NamedTuple):
    """What a rank has drawn and graded."""

    places: list[int]  # of its prompts among all
    completed: Completed | None  # None where it has no prompt
    rewarded: RewardedBatch


def draw_and_grade(
    config: TrainConfig,
    parts: Parts,
    prompts: Sequence[Prompt],
    sampling: Sampling,
    seed: int,
    updates: int,
) -> tuple[Completed, Graded, float]:
    """Return completions of prompts, their rewards, and the seconds that drawing took.

    Reward functions can ask how many updates are done, `updates`, and how many there will be.
    All ranks get all of them, each having drawn and graded those of its own prompts. A completion
    is drawn with the seed of its prompt and its number among the prompt's copies, so that it is the
    same on any number of ranks.
    """
    axis, start = parts.mesh.rollouts, time.perf_counter()
    places = own_prompts([prompt.text for prompt in prompts], axis)
    own = [prompts[place] for place in places]
    completed = None
    if own or axis.size == 1:
        completed = complete(parts.task, parts.generator, own, sampling, seed)
    seconds = time.perf_counter() - start
    rewarded = RewardedBatch([], {})
    if completed is not None:
        rewarded = batch_rewards(
            parts.task,
            completed.prompts,
            completed.outcomes,
            limits_of(config),
            completed.completion_ids(),
            TrainerState(updates, config.steps),
        )
    share = _Share(places, completed, rewarded)
    if axis.size > 1:
        share = _joined(prompts, _of_all_ranks(share, axis), config.device)
    every = graded_of(parts.task, share.rewarded, config.reward_weights, config.on_reward_error)
    assert share.completed is not None  # there is a prompt
    return share.completed, every, seconds


def own_prompts(texts: Sequence[str], axis: Axis) -> list[int]:
    """Return the places of this rank's prompts: about as many for each rank.

    Equal prompts are on one rank, where they are told apart by their order.
    """
    places: dict[str, list[int]] = {}
    for place, text in enumerate(texts):
        places.setdefault(text, []).append(place)
    shares: list[list[int]] = [[] for _ in range(axis.size)]
    for equal in places.values():
        min(shares, key=len).extend(equal)
    return sorted(shares[axis.rank])


def _of_all_ranks(share: _Share, axis: Axis) -> list[_Share]:
    """Return what all ranks have drawn, without what is of no use elsewhere or cannot travel."""
    completed = share.completed
    if completed is not None:
        samples = tree.map(
            lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, completed.samples
        )
        completed = completed._replace(prompts=[], outcomes=[], samples=samples)
    rows = [each._replace(cause=None) for each in share.rewarded.rows]
    rewarded = share.rewarded._replace(rows=rows)
    shares = gather_objects(_Share(share.places, completed, rewarded), axis)
    shares[axis.rank] = shares[axis.rank]._replace(rewarded=share.rewarded)  # with its errors
    return shares


def _joined(prompts: Sequence[Prompt], shares: Sequence[_Share], device: str) -> _Share:
    """Return the completions of all ranks in the order of the prompts."""
    drawn = [share.completed for share in shares if share.completed is not None]
    size = drawn[0].group_size
    rows = [  # of each completion as the ranks give them: its place among all
        place * size + copy for share in shares for place in share.places for copy in range(size)
    ]
    order = sorted(range(len(rows)), key=rows.__getitem__)

    texts = _ordered([each.texts for each in drawn], order)
    completed = Completed(
        prompts=[prompt for prompt in prompts for _ in range(size)],
        prompt_tokens=_ordered([each.prompt_tokens for each in drawn], order),
        samples=_joined_samples([each.samples for each in drawn], order, device),
        texts=texts,
        outcomes=list(texts),
        turns=_ordered([each.turns for each in drawn], order),
        group_size=size,
    )
    rewarded = _ordered([share.rewarded.rows for share in shares], order)
    metrics: dict[str, list[float]] = {}
    for share in shares:
        for name, values in share.rewarded.metrics.items():
            metrics.setdefault(name, []).extend(values)
    return _Share(list(range(len(prompts))), completed, RewardedBatch(rewarded, metrics))


def _ordered(parts: Sequence[Sequence[_Value]], order: list[int]) -> list[_Value]:
    """Return the values of all ranks in an order of their rows."""
    flat = [value for part in parts for value in part]
    return [flat[row] for row in order]


def _joined_samples(parts: Sequence[Samples], order: list[int], device: str) -> Samples:
    """Return samples of several ranks as one, in an order of their rows."""
    width = max(part.tokens.shape[1] for part in parts)

    def of(leaves: list[Tensor]) -> Tensor:
        wide = [pad(leaf, (0, width - leaf.shape[1])) for leaf in leaves]
        return torch.cat(wide)[order].to(device)

    return Samples(
        tokens=of([part.tokens for part in parts]),
        mask=of([part.mask for part in parts]),
        logprobs=of([part.logprobs for part in parts]),
        policy_logprobs=of([part.policy_logprobs for part in parts]),
        finish_reasons=tuple(_ordered([part.finish_reasons for part in parts], order)),
        policy_version=parts[0].policy_version,
    )
