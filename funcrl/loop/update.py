"""The updates of a step: a rollout scored, collated, and trained on in every pass."""

import torch

from funcrl.config import TrainConfig
from funcrl.core import rng, tree
from funcrl.core.types import (
    Absent,
    Metrics,
    ModelFn,
    Params,
    Sample,
    TokenScores,
    TrainState,
)
from funcrl.loop.build import Parts, whole_params
from funcrl.loop.pack import to_rows
from funcrl.loop.rollouts.roll import ORDER, Rolled, rows_of, whole_trained
from funcrl.models.logprobs import score
from funcrl.parallel import all_gather, own_rows
from funcrl.rl import metrics
from funcrl.rl.batching import collate, drop_zero_variance, minibatches, pad_length
from funcrl.rl.critic import gae


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
    rows = rows_of(rollout)
    if parts.sampling.truncates and config.behavior == "policy" and not parts.is_supervised:
        # The sampler's log-probabilities are of a truncated and renormalised distribution, which is
        # not the one that is trained: the ratio would not be 1 before the first update.
        drawn_by = whole_trained(parts, rolled.policy)
        behavior = scored(config, parts, drawn_by, rows)
        rollout = rollout._replace(behavior_logprobs=behavior.where(rollout.mask, 0.0))
    ref_logprobs: torch.Tensor | Absent = ()
    if reference is not None:
        ref_logprobs = scored(config, parts, reference, rows)
    teacher_logprobs: torch.Tensor | Absent = ()
    if parts.teacher is not None and parts.teacher_fn is not None:
        teacher_logprobs = scored(config, parts, parts.teacher.params, rows, parts.teacher_fn)
    batch = collate(rollout, parts.algorithm, ref_logprobs, teacher_logprobs)
    if parts.algorithm.value_weight != ():
        options = config.algorithm
        # Once for all updates of the rollout, by the critic before the first.
        scores = _scores(config, parts, whole_params(parts, state.params), rows)
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


def scored(
    config: TrainConfig,
    parts: Parts,
    params: Params,
    rows: Sample,
    model_fn: ModelFn | None = None,
) -> torch.Tensor:
    """Return the log-probabilities [B, T] of rows, as `_scores` does."""
    return _scores(config, parts, params, rows, model_fn).logprobs


def _scores(
    config: TrainConfig,
    parts: Parts,
    params: Params,
    rows: Sample,
    model_fn: ModelFn | None = None,
) -> TokenScores:
    """Return the scores [B, T] of rows, of which each rank computes some.

    They are the policy's if no other model function is given.
    """
    axis, count = parts.mesh.all, len(rows.tokens)
    size = -(-count // axis.size)
    places = torch.arange(axis.rank * size, (axis.rank + 1) * size, device=rows.tokens.device)
    own = rows if axis.size == 1 else tree.map(lambda leaf: leaf[places % count], rows)
    scores = score(model_fn or parts.model_fn, params, own, config.microbatch)
    return tree.map(lambda leaf: all_gather(leaf, axis)[:count], scores)


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
