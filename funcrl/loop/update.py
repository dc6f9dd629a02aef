"""The updates of a step: a rollout scored, collated, and trained on in every pass."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from funcrl.config import TrainConfig
from funcrl.core import rng, tree
from funcrl.core.files import brief
from funcrl.core.rows import row_ends
from funcrl.core.types import (
    Absent,
    Metrics,
    ModelFn,
    Params,
    Rollout,
    TokenScores,
    TrainState,
)
from funcrl.generators import Scorer
from funcrl.loop.build import Parts, whole_params
from funcrl.loop.pack import score_in_rows, to_rows
from funcrl.loop.rollouts.roll import ORDER, Rolled, whole_trained
from funcrl.models.logprobs import Teacher
from funcrl.parallel import Mesh, all_gather, own_rows
from funcrl.rl import metrics
from funcrl.rl.batching import collate, drop_zero_variance, minibatches, pad_length
from funcrl.rl.critic import gae

_Rows = TypeVar("_Rows")
_SKIPPED_STEPS = (5, 50, 500, 5000)  # numbers of skipped steps in a row that print a line


def update(
    config: TrainConfig,
    parts: Parts,
    state: TrainState,
    rolled: Rolled,
    reference: Params | None,
    index: int,
) -> tuple[TrainState, dict[str, float]]:
    """Train on a rollout: every pass over its mini-batches."""
    rollout = rolled.rollout
    # A teacher teaches where rewards are equal, too.
    if rollout is not None and config.drop_zero_variance and parts.algorithm.teacher_weight == ():
        rollout = drop_zero_variance(rollout)
    if rollout is None or not len(rollout.rewards):
        return state, {"num_tokens": 0.0}  # nothing differed, so there is nothing to learn
    rollout = pad_length(rollout, config.length_multiple)
    if parts.sampling.truncates and config.behavior == "policy" and not parts.is_supervised:
        # The sampler's log-probabilities are of a truncated and renormalised distribution, which is
        # not the one that is trained: the ratio would not be 1 before the first update.
        drawn_by = whole_trained(parts, rolled.policy)
        behavior = scored(config, parts, drawn_by, rollout)
        rollout = rollout._replace(behavior_logprobs=behavior.where(rollout.mask, 0.0))
    ref_logprobs: torch.Tensor | Absent = ()
    if reference is not None:
        ref_logprobs = scored(config, parts, reference, rollout)
    teacher_logprobs = _teacher_logprobs(config, parts, rollout)
    batch = collate(rollout, parts.algorithm, ref_logprobs, teacher_logprobs)
    if parts.algorithm.value_weight != ():
        options = config.algorithm
        # Once for all updates of the rollout, by the critic before the first.
        scores = _scores(config, parts, whole_params(parts, state.params), rollout)
        batch = gae(options.gamma, options.lam, whiten=options.whiten)(scores, batch)
    reports: list[Metrics] = []
    for iteration in range(config.num_iterations):
        order = rng.fold_in(config.seed, ORDER, index, iteration)
        count = min(config.num_minibatches, batch.tokens.shape[0])
        for part in minibatches(batch, parts.algorithm, count, order):
            rows_of_all = to_rows(config, part)
            own = own_rows(rows_of_all, parts.mesh, in_order=config.numerics == "exact")
            state, report = parts.step(state, own)
            if parts.agrees and rolled.policy.version == index - 1 and not reports:
                _check_agreement(report, index)
            reports.append(report)
    num_tokens = [report.sums["num_tokens"] for report in reports]
    return state, metrics.to_floats(metrics.merge(reports, weights=num_tokens))


class SkippedUpdates:
    """Counts the steps in a row all of whose updates were skipped, for they were not finite."""

    def __init__(self, row: Mapping[str, Any], state: TrainState) -> None:
        self._before = self._counts(row, state)
        self._steps = 0

    def lines(self, row: Mapping[str, Any], state: TrainState) -> list[str]:
        """Return what to say after a step."""
        (skipped, updates), before = self._counts(row, state), self._before
        self._before = skipped, updates
        if updates == before[1]:
            return []  # nothing differed, so there was nothing to learn
        self._steps = self._steps + 1 if skipped - before[0] == updates - before[1] else 0
        if self._steps not in _SKIPPED_STEPS:
            return []
        return [
            f"No update in the last {self._steps} steps: all of them were skipped, because their "
            f"gradients or updates were not finite (num_skipped_updates counts them). A lower "
            f"--optimizer.learning-rate, or an earlier checkpoint, may help."
        ]

    def _counts(self, row: Mapping[str, Any], state: TrainState) -> tuple[int, int]:
        return int(row.get("num_skipped_updates") or 0), int(state.step)


def check_updated(state: TrainState, row: Mapping[str, Any]) -> None:
    """Raise if each update of a run was skipped.

    Args:
        state: at its end.
        row: of metrics, of its last step.
    """
    if 0 < int(state.step) == row.get("num_skipped_updates"):
        raise ValueError(
            f"train expects finite gradients and updates, got none in {int(state.step)} updates, "
            f"all of which were skipped: the policy is that of step 0."
        )


def scored(
    config: TrainConfig,
    parts: Parts,
    params: Params,
    rollout: Rollout,
    model_fn: ModelFn | None = None,
) -> torch.Tensor:
    """Return the log-probabilities [B, T] of a rollout's sampled tokens, as `_scores` does."""
    return _scores(config, parts, params, rollout, model_fn).logprobs


def _scores(
    config: TrainConfig,
    parts: Parts,
    params: Params,
    rollout: Rollout,
    model_fn: ModelFn | None = None,
) -> TokenScores:
    """Return the scores [B, T] of a rollout's sampled tokens, of which each rank computes some.

    They are the policy's if no other model function is given.
    """
    fn, rows = model_fn or parts.model_fn, (rollout.tokens, rollout.mask)
    return _of_ranks(parts.mesh, lambda own: score_in_rows(config, fn, params, *own), rows)


def _teacher_logprobs(config: TrainConfig, parts: Parts, rollout: Rollout) -> torch.Tensor | Absent:
    """Return the teacher's log-probabilities [B, T] of a rollout, if the batch is to have them."""
    teacher = parts.teacher
    if isinstance(teacher, Teacher):
        if parts.teacher_fn is None:
            return ()  # it is taught by distributions, which the model function computes
        return scored(config, parts, teacher.params, rollout, parts.teacher_fn)
    if teacher is None:
        return ()
    rows = rollout.tokens, row_ends(rollout.mask)
    return _of_ranks(parts.mesh, lambda own: _asked(teacher, *own), rows)


def _asked(teacher: Scorer, tokens: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return what a teacher says of rows [B, T] up to their ends [B]: log-probabilities [B, T]."""
    prompts = [row[:end] for row, end in zip(tokens.tolist(), ends.tolist(), strict=True)]
    found = torch.zeros(tokens.shape, device=tokens.device)
    asked = [row for row, prompt in enumerate(prompts) if prompt]
    answers = teacher.score([prompts[row] for row in asked]) if asked else []
    lengths, wanted = [len(each) for each in answers], [len(prompts[row]) - 1 for row in asked]
    if lengths != wanted:
        raise ValueError(
            f"train expects score(prompts) of the teacher {teacher!r} to return the "
            f"log-probability of each token from the second on, {brief(str(wanted))} of them, got "
            f"{brief(str(lengths))}."
        )
    for row, answer in zip(asked, answers, strict=True):
        found[row, 1 : len(prompts[row])] = torch.tensor(answer, device=tokens.device)
    return found


def _of_ranks(mesh: Mesh, fn: Callable[[_Rows], Any], rows: _Rows) -> Any:
    """Return a function of all rows, of which each rank computes some."""
    axis, first = mesh.all, tree.leaves(rows)[0]
    count, own = len(first), rows
    if axis.size > 1:
        size = -(-count // axis.size)
        places = (torch.arange(size, device=first.device) + axis.rank * size) % count
        own = tree.map(lambda leaf: leaf[places], rows)
    return tree.map(lambda leaf: all_gather(leaf, axis)[:count], fn(own))


def _check_agreement(report: Metrics, index: int) -> None:
    """Raise unless every ratio was exactly 1 before the first update of the policy that drew."""
    found = report.maxes.get("sampling/sampling_logp_difference/max")
    difference = 0.0 if found is None else found.item()  # nothing was drawn
    if difference != 0:
        raise RuntimeError(
            f"train expects the generator's log-probabilities to be the trainer's own, to the last "
            f"bit, with --numerics exact, got a difference of {difference:.3g} in step {index}; "
            f"funcrl parity --numerics exact --bisect names the operation that differs."
        )
