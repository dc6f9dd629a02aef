"""The loss of one sample, with its KL estimators and penalties.

The three estimators (Schulman, "Approximating KL divergence", 2020) differ as values and again as
losses, once they are differentiated through `logprobs` on tokens the policy sampled:

| estimator | value, expected over the policy | its gradient as a loss, expected |
|---|---|---|
| k1 | KL(pi, ref), unbiased, high variance | 0: no penalty at all |
| k2 | biased, low variance | that of KL(pi, ref): right |
| k3 | KL(pi, ref), unbiased, low variance | that of KL(ref, pi), the other direction |

`with_kl_gradient(k1)` and `with_kl_gradient(k3)` keep the value and have the right gradient.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from funcrl.core import checks, numerics, tree
from funcrl.core.arguments import Finite, NotNegative, Positive, checked
from funcrl.core.printing import remembers
from funcrl.core.types import (
    STREAMS,
    Absent,
    Algorithm,
    Metrics,
    Penalty,
    PenaltyFn,
    Ratio,
    Surrogate,
    SurrogateFn,
    TokenScores,
    ValueCostFn,
)

# (logprobs, ref_logprobs), both [T] -> estimate [T]
EstimatorFn: TypeAlias = Callable[[Tensor, Tensor], Tensor]
# (logprobs, behavior_logprobs, ref_logprobs) -> cost [T]
KLCostFn: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]
LOSS_PART = "loss/"  # how the names of a loss's parts begin
# k1+ and k3+ are k1 and k3 `with_kl_gradient`.
KLEstimator: TypeAlias = Literal["k1", "k2", "k3", "k1+", "k3+"]


@checked
def k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `log pi - log ref` per token; as a loss its expected gradient is 0.

    Args:
        logprobs: [T], of the policy.
        ref_logprobs: [T], of the reference.

    Example:
        >>> import torch, funcrl
        >>> funcrl.losses.k1(torch.tensor([-1.0]), torch.tensor([-2.0]))
        tensor([1.])
    """
    return _log_ratio("k1", logprobs, ref_logprobs)


@checked
def k2(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `(log pi - log ref)^2 / 2` per token; as a loss its gradient is that of KL(pi, ref).

    Args:
        logprobs: [T], of the policy.
        ref_logprobs: [T], of the reference.

    Example:
        >>> import torch, funcrl
        >>> funcrl.losses.k2(torch.tensor([-1.0]), torch.tensor([-3.0]))
        tensor([2.])
    """
    return _log_ratio("k2", logprobs, ref_logprobs).square() / 2


@checked
def k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    """Return `ref/pi - 1 - log(ref/pi)` per token, never negative: the KL of the GRPO paper.

    As a loss its expected gradient is that of KL(ref, pi), not of KL(pi, ref). The exponent is
    held at 20, so that one token cannot overflow the batch.

    Args:
        logprobs: [T], of the policy.
        ref_logprobs: [T], of the reference.

    Example:
        >>> import torch, funcrl
        >>> funcrl.losses.k3(torch.tensor([0.5]).log(), torch.tensor([1.0]).log())
        tensor([0.3069])
    """
    log_ratio = _log_ratio("k3", logprobs, ref_logprobs)
    # expm1 keeps the digits of small differences, where k3 is about log_ratio^2 / 2.
    return torch.expm1((-log_ratio).clamp(max=numerics.MAX_LOG_RATIO)) + log_ratio


@checked
@remembers
def as_loss(estimator: EstimatorFn) -> KLCostFn:
    """Return the estimator as a per-token cost, differentiated as it stands.

    Example:
        >>> import torch, funcrl
        >>> cost = funcrl.losses.as_loss(funcrl.losses.k2)
        >>> cost(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([-3.0]))
        tensor([2.])
    """

    @checked
    def cost(logprobs: Tensor, behavior_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        del behavior_logprobs
        return estimator(logprobs, ref_logprobs)

    return cost


@checked
@remembers
def with_kl_gradient(estimator: EstimatorFn) -> KLCostFn:
    """Return a cost with the estimator's expected value and the gradient of KL(pi, ref).

        stop_gradient(pi / pi_behavior) * (stop_gradient(estimate - k2) + k2)

    The gradient is k2's, unbiased whatever the estimator; the constant importance weight keeps it
    so on tokens that another policy sampled (DeepSeek-V3.2, arXiv:2512.02556; verl's "k3+").

    Example:
        >>> import torch, funcrl
        >>> cost = funcrl.losses.with_kl_gradient(funcrl.losses.k1)
        >>> cost(torch.tensor([-1.0]), torch.tensor([-1.0]), torch.tensor([-3.0]))
        tensor([2.])
    """

    @checked
    def cost(logprobs: Tensor, behavior_logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        checks.check_shape(
            "with_kl_gradient", "behavior_logprobs", behavior_logprobs, "logprobs", logprobs.shape
        )
        weight = numerics.exp_ratio(logprobs - behavior_logprobs).detach()
        surrogate = k2(logprobs, ref_logprobs)
        value = estimator(logprobs, ref_logprobs)
        return weight * ((value - surrogate).detach() + surrogate)

    return cost


_KL_COSTS: dict[KLEstimator, tuple[EstimatorFn, KLCostFn]] = {
    "k1": (k1, as_loss(k1)),
    "k2": (k2, as_loss(k2)),
    "k3": (k3, as_loss(k3)),
    "k1+": (k1, with_kl_gradient(k1)),
    "k3+": (k3, with_kl_gradient(k3)),
}


@checked
@remembers
def penalty(
    kl: NotNegative = 0.0, kl_estimator: KLEstimator | EstimatorFn = "k3", entropy: Finite = 0.0
) -> PenaltyFn:
    """Return `kl * cost(estimator) - entropy * H(pi)` per token.

    Args:
        kl: how much the distance to the reference costs; 0 needs no reference.
        kl_estimator: "k1", "k2", "k3", "k1+", "k3+" (`with_kl_gradient`), or a function of
            (logprobs, ref_logprobs). Of the names only k2 and those with "+" have the gradient
            of KL(pi, ref); see the module's table.
        entropy: how much a nat of a token's entropy earns, before the token's weight.

    Returns:
        A function with the arguments as attributes: one whose `kl` is above 0 needs a reference.

    Example:
        >>> import torch, funcrl
        >>> fn = funcrl.losses.penalty(entropy=0.5)
        >>> scores = funcrl.TokenScores(torch.tensor([-1.0]), torch.tensor([2.0]))
        >>> fn(scores, torch.tensor([-1.0]), ())
        Penalty(cost=tensor([-1.]), kl=())
    """
    if callable(kl_estimator):
        estimator, kl_cost = kl_estimator, as_loss(kl_estimator)
    else:
        estimator, kl_cost = _KL_COSTS[kl_estimator]

    @checked
    def penalty_fn(
        scores: TokenScores, behavior_logprobs: Tensor, ref_logprobs: Tensor | Absent
    ) -> Penalty:
        cost = -entropy * scores.entropy if entropy else torch.zeros_like(scores.logprobs)
        if isinstance(ref_logprobs, tuple):
            if kl:
                raise ValueError(f"penalty(kl={kl}) expects ref_logprobs in the batch, got ().")
            return Penalty(cost, ())
        if kl:
            cost = cost + kl * kl_cost(scores.logprobs, behavior_logprobs, ref_logprobs)
        return Penalty(cost, estimator(scores.logprobs, ref_logprobs).detach())

    return penalty_fn


# The fields of a sample that are read inside the mask; those of streams may be absent.
_READ = ("behavior_logprobs", "advantages", "token_weights", "ref_logprobs")
_OF_STREAMS = (
    "ce_weights", "teacher_weights", "teacher_logprobs", "value_weights", "old_values", "returns",
)  # fmt: skip


@checked
@remembers
def clipped_value(clip: Positive = 0.2) -> ValueCostFn:
    """Return PPO's error of a critic, which moves it no further than `clip` in one rollout.

        max((V - returns)^2, (V_old + clamp(V - V_old, -clip, clip) - returns)^2) / 2

    Args:
        clip: how far a value may be from that before the first update; inf for no bound.

    Example:
        >>> import torch, funcrl
        >>> cost = funcrl.losses.clipped_value(0.2)
        >>> cost(torch.tensor([0.5]), torch.tensor([0.0]), torch.tensor([1.0]))
        tensor([0.3200])
    """

    @checked
    def cost(values: Tensor, old_values: Tensor, returns: Tensor) -> Tensor:
        near = old_values + (values - old_values).clamp(-clip, clip)
        return torch.maximum((values - returns).square(), (near - returns).square()) / 2

    return cost


@checked
def policy_loss(algorithm: Algorithm, scores: TokenScores, sample: Any) -> tuple[Tensor, Metrics]:
    """Return one sample's loss and its metrics; the caller vmaps and sums.

        loss = sum_t token_weights[t] * (penalty[t] - surrogate[t])
             + sum_t ce_weights[t] * -log pi(y_t)
             + sum_t teacher_weights[t] * divergence[t]
             + sum_t value_weights[t] * value_cost(V_t, old_values[t], returns[t])

    A stream without weights is left out. The divergence from the teacher is `scores.divergence`,
    or else the estimate of KL(pi, teacher) by `with_kl_gradient(k1)` from `teacher_logprobs`.

    Tokens outside the mask add nothing to the loss, its gradient or the metrics. The algorithm's
    functions see a ratio of 1 there and 0 for everything else, and what they return there is not
    used: it may be NaN. `collate`, and a step, leave tokens without a finite behaviour
    log-probability out of the mask.

    Args:
        algorithm: whose ratio, surrogate and penalty to use.
        scores: [T], what `model_fn(params, sample)` returned.
        sample: a row of a `Batch` or of a `PackedBatch`.

    Returns:
        The 0-d loss, and `Metrics` in which every sum is over the sample's tokens; where it is not
        the policy gradient alone, its parts too: `loss/policy`, `loss/cross_entropy`,
        `loss/teacher` and `loss/value`.

    Example:
        >>> import torch, funcrl
        >>> sample = funcrl.Batch(
        ...     tokens=torch.tensor([5, 6]), positions=torch.tensor([0, 1]),
        ...     mask=torch.tensor([False, True]), behavior_logprobs=torch.tensor([0.0, -1.0]),
        ...     advantages=torch.tensor([0.0, 2.0]), token_weights=torch.tensor([0.0, 1.0]))
        >>> scores = funcrl.TokenScores(torch.tensor([0.0, -1.0]), torch.tensor([0.0, 0.7]))
        >>> funcrl.policy_loss(funcrl.grpo(), scores, sample)[0]
        tensor(-2.)
        >>> sample = sample._replace(token_weights=(), ce_weights=torch.tensor([0.0, 1.0]))
        >>> funcrl.policy_loss(funcrl.sft(), scores, sample)[0]
        tensor(1.)
    """
    _check_sample(scores, sample)
    scores, row = _inside(scores, sample)
    losses: dict[str, Tensor] = {}
    metrics = Metrics({"entropy": scores.entropy.detach().sum()}, means={}, maxes={}, last={})
    if not isinstance(row.token_weights, tuple):
        surrogate, penalized = _policy_terms(algorithm, scores, row)
        terms = torch.where(row.mask, penalized.cost - surrogate.objective, 0.0)
        losses["policy"] = (row.token_weights * terms).sum()
        metrics.sums.update(_policy_sums(row.mask, surrogate, penalized))
    if not isinstance(row.ce_weights, tuple):
        losses["cross_entropy"] = -(row.ce_weights * scores.logprobs).sum()
    if not isinstance(row.teacher_weights, tuple):
        losses["teacher"] = (row.teacher_weights * _divergence(scores, row)).sum()
    if not isinstance(row.value_weights, tuple):
        losses["value"] = (row.value_weights * _value_cost(algorithm, scores, row)).sum()
    if "policy" in losses or "cross_entropy" not in losses:  # of tokens that were drawn
        difference = (scores.logprobs - row.behavior_logprobs).detach()
        metrics.sums.update(_sampling_sums(row.mask, difference))
        metrics.maxes["sampling/sampling_logp_difference/max"] = difference.abs().amax()
    if losses.keys() != {"policy"}:
        metrics.sums.update({f"{LOSS_PART}{name}": part.detach() for name, part in losses.items()})
    return functools.reduce(torch.add, losses.values()), metrics


class _Row(NamedTuple):
    """The fields of a sample that a loss reads, 0 outside the mask."""

    mask: Tensor
    segment_ids: Tensor | Absent
    behavior_logprobs: Tensor
    advantages: Tensor
    token_weights: Tensor | Absent
    ref_logprobs: Tensor | Absent
    ce_weights: Tensor | Absent
    teacher_weights: Tensor | Absent
    teacher_logprobs: Tensor | Absent
    value_weights: Tensor | Absent
    old_values: Tensor | Absent
    returns: Tensor | Absent


def _inside(scores: TokenScores, sample: Any) -> tuple[TokenScores, _Row]:
    """Return scores and a row with 0 outside the mask: junk there reaches neither pass."""
    nothing = torch.zeros_like(scores.logprobs)
    scores, fields = tree.map(
        lambda values: torch.where(sample.mask, values, nothing),
        (scores, [getattr(sample, name, ()) for name in (*_READ, *_OF_STREAMS)]),
    )
    return scores, _Row(sample.mask, getattr(sample, "segment_ids", ()), *fields)


def _policy_terms(
    algorithm: Algorithm, scores: TokenScores, row: _Row
) -> tuple[Surrogate, Penalty]:
    """Return what an algorithm's functions give for each token."""
    kept, behavior = row.mask, row.behavior_logprobs
    ratio = algorithm.ratio(scores.logprobs, behavior, kept, row.segment_ids)
    _check_part("ratio", ratio, Ratio, kept.shape)
    # The inputs of the functions are masked, and not only their outputs: a gradient of 0 times a
    # slope that is not finite is NaN, which a ratio over a whole sequence would spread.
    surrogate = algorithm.surrogate(
        scores.logprobs,
        torch.where(kept, ratio.ratio, 1.0),
        torch.where(kept, row.advantages * ratio.correction, 0.0),
        **({"segment_ids": row.segment_ids} if _takes_segments(algorithm.surrogate) else {}),
    )
    _check_part("surrogate", surrogate, Surrogate, kept.shape)
    penalized = algorithm.penalty(scores, behavior, row.ref_logprobs)
    _check_part("penalty", penalized, Penalty, kept.shape)
    return surrogate, penalized


def _takes_segments(surrogate: SurrogateFn) -> bool:
    """Return whether a surrogate asks where the samples of a packed row are."""
    try:
        return "segment_ids" in inspect.signature(surrogate).parameters
    except ValueError:  # of a function that has no signature
        return False


_from_teacher = with_kl_gradient(k1)


def _divergence(scores: TokenScores, row: _Row) -> Tensor:
    """Return each token's divergence from the teacher."""
    if not isinstance(scores.divergence, tuple):
        return scores.divergence
    if isinstance(row.teacher_logprobs, tuple):
        raise ValueError(
            "policy_loss expects teacher_logprobs in the batch, or a model_fn that scores the "
            "divergence from a teacher, for a batch with teacher_weights, got neither."
        )
    return _from_teacher(scores.logprobs, row.behavior_logprobs, row.teacher_logprobs)


def _value_cost(algorithm: Algorithm, scores: TokenScores, row: _Row) -> Tensor:
    """Return the cost of what the critic expects at each token."""
    values, old, returns = scores.values, row.old_values, row.returns
    if isinstance(values, tuple) or isinstance(old, tuple) or isinstance(returns, tuple):
        raise ValueError(
            "policy_loss expects returns and old_values in a batch with value_weights, which "
            "funcrl.gae() gives it, and a model_fn with critic=True, got one without."
        )
    if isinstance(algorithm.value_cost, tuple):
        raise ValueError(
            f"policy_loss expects an algorithm with a value_cost for a batch with value_weights, "
            f"such as funcrl.ppo(), got {algorithm!r}."
        )
    cost = algorithm.value_cost(values, old, returns)
    _check_tokens("algorithm.value_cost(...)", {"cost": cost}, row.mask.shape)
    return torch.where(row.mask, cost, 0.0)


def _policy_sums(kept: Tensor, surrogate: Surrogate, penalized: Penalty) -> dict[str, Tensor]:
    """Return sums over the tokens inside the mask of what the algorithm's functions gave."""
    clipped = (surrogate.clipped_low, surrogate.clipped_high)
    low, high = (kept & False if isinstance(each, tuple) else each & kept for each in clipped)
    dtype = surrogate.objective.dtype
    sums = {
        "clip_ratio/low_mean": low.to(dtype).sum(),
        "clip_ratio/high_mean": high.to(dtype).sum(),
        "clip_ratio/region_mean": (low | high).to(dtype).sum(),
    }
    if not isinstance(penalized.kl, tuple):
        sums["kl"] = torch.where(kept, penalized.kl, 0.0).sum()
    return sums


def _sampling_sums(kept: Tensor, difference: Tensor) -> dict[str, Tensor]:
    """Return sums over tokens of how far the policy is from the one that drew them."""
    return {
        "sampling/sampling_logp_difference/mean": difference.abs().sum(),
        "sampling/importance_sampling_ratio/mean": (numerics.exp_ratio(difference) * kept).sum(),
    }


def _check_sample(scores: TokenScores, sample: Any) -> None:
    missing = [name for name in ("mask", *_READ) if not hasattr(sample, name)]
    if missing:
        raise TypeError(
            f"policy_loss expects sample to be a row of a Batch or PackedBatch, got "
            f"{type(sample).__name__} without {missing[0]}."
        )
    checks.check_rank("policy_loss", "sample.mask", sample.mask, "T")
    read = {name: getattr(sample, name, ()) for name in (*_READ, *_OF_STREAMS, "segment_ids")}
    if all(isinstance(read[name], tuple) for name in STREAMS):
        raise ValueError(
            f"policy_loss expects weights of at least one stream, {', '.join(STREAMS)}, got none."
        )
    for what, values in (("scores", scores._asdict()), ("sample", read)):
        _check_tokens(what, values, sample.mask.shape)


def _check_part(name: str, part: Any, kind: type[Any], shape: torch.Size) -> None:
    """Raise if a function of the algorithm did not return one number a token."""
    what = f"algorithm.{name}(...)"
    if not isinstance(part, kind):
        raise TypeError(
            f"policy_loss expects {what} to be a {kind.__name__}, got {type(part).__name__}."
        )
    _check_tokens(what, part._asdict(), shape)


def _check_tokens(what: str, values: dict[str, Any], shape: torch.Size) -> None:
    for name, value in values.items():
        if not isinstance(value, tuple):
            checks.check_shape("policy_loss", f"{what}.{name}", value, "sample.mask", shape)


def _log_ratio(function: str, logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    checks.check_rank(function, "logprobs", logprobs, "T")
    checks.check_shape(function, "ref_logprobs", ref_logprobs, "logprobs", logprobs.shape)
    return logprobs - ref_logprobs
