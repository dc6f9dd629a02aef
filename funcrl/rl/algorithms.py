"""GRPO and its family: each algorithm composes five functions and adds nothing of its own.

`docs/algorithms.md` has them side by side.
"""

from functools import partial
from typing import Literal, TypeAlias, TypedDict, Unpack

from funcrl.core.arguments import Finite, NotNegative, Positive, checked
from funcrl.core.types import AdvantageFn, Algorithm, CorrectionFn, RatioFn, SurrogateFn, WeightFn
from funcrl.rl import advantages, aggregation, losses, ratios, surrogates


class Tunables(TypedDict, total=False):
    """The keyword arguments that every algorithm takes besides its own.

    Args:
        kl: coefficient of the KL penalty (TRL's `beta`), 0 when left out; above 0 the batch needs
            `ref_logprobs`.
        kl_estimator: "k1", "k2", "k3" (when left out), "k1+", "k3+", or a function of
            (logprobs, ref_logprobs); see `funcrl.losses` for which are biased as losses.
        entropy: coefficient of the entropy bonus, 0 when left out. Each token's has the weight of
            its surrogate; TRL's `entropy_coef` multiplies the mean over tokens, which is the same
            for `weight=funcrl.aggregation.token_mean` (`dapo`, `cispo`) alone.
        correction: importance weights for the generator's log-probabilities, such as
            `funcrl.ratios.truncated(3.0)`; when left out the ratio is taken against them.
        weight: `(mask [B, T], dtype) -> token weights`, in place of the algorithm's own rule; see
            `funcrl.aggregation`.
        teacher: coefficient of the mean over tokens of the divergence from a teacher, 0 when left
            out; above 0 the batch needs `teacher_logprobs`, or the `model_fn` a teacher.
    """

    kl: NotNegative
    kl_estimator: losses.KLEstimator | losses.EstimatorFn
    entropy: Finite
    correction: CorrectionFn | None
    weight: WeightFn
    teacher: NotNegative


Scale: TypeAlias = Literal["group", "batch", "none"]
_SCALES: dict[Scale, AdvantageFn] = {
    "group": advantages.by_group(advantages.standardize),
    "batch": advantages.standardize_by_batch,
    "none": advantages.by_group(advantages.center),
}
_RATIOS: dict[ratios.Level, RatioFn] = {"token": ratios.token, "sequence": ratios.sequence}


@checked
def grpo(
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    dual_clip: float | None = None,
    level: ratios.Level = "token",
    scale_rewards: Scale | AdvantageFn = "group",
    **tunables: Unpack[Tunables],
) -> Algorithm:
    """Return GRPO (DeepSeekMath, arXiv:2402.03300).

        A_i = (R_i - mean(R)) / std(R)                              over the prompt's group
        J = mean_i (1/|y_i|) sum_t min(r A, clip(r, 1-low, 1+high) A) - kl k3(pi, ref)
        r = pi(y_t) / pi_behavior(y_t)

    The paper uses `kl=0.04`; the default, like TRL's, needs no reference model.

    Args:
        clip: (low, high): the ratio's bounds are `1 - low` and `1 + high`.
        dual_clip: bounds the loss where the advantage is negative (verl's `clip_ratio_c`).
        level: "token", or "sequence" for one ratio a completion (GSPO).
        scale_rewards: "group", "batch" or "none": whose deviation divides the advantage; or a
            function `(rewards [B], group [B]) -> [B]`.
        tunables: see `Tunables`.

    Example:
        >>> import funcrl
        >>> algorithm = funcrl.grpo(clip=(0.2, 0.28), kl=0.04)
        >>> step = funcrl.grpo_step(lambda params, sample: ..., algorithm=algorithm)
    """
    surrogate = surrogates.clipped(*clip, dual_clip=dual_clip)
    return _compose(tunables, scale_rewards, _RATIOS[level], surrogate, aggregation.sequence_mean)


@checked
def dr_grpo(
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    length: Positive = 512,
    **tunables: Unpack[Tunables],
) -> Algorithm:
    """Return Dr. GRPO (arXiv:2503.20783): GRPO without its two biases.

        A_i = R_i - mean(R)                 no deviation: no bias to prompts too easy or too hard
        J = mean_i (1/length) sum_t min(r A, clip(r) A)      no bias to long failures

    Args:
        clip: as in `grpo`.
        length: the constant in place of a completion's own length; the longest completion
            allowed (TRL's default is 512). Another value only rescales the loss.
        tunables: see `Tunables`.

    Example:
        >>> import torch, funcrl
        >>> funcrl.dr_grpo(length=4).weight(torch.tensor([[False, True, True]]))
        tensor([[0.0000, 0.2500, 0.2500]])
    """
    weight = partial(aggregation.constant, length=length)
    return _compose(tunables, "none", ratios.token, surrogates.clipped(*clip), weight)


@checked
def dapo(
    *,
    clip: tuple[float, float] = (0.2, 0.28),
    dual_clip: float | None = None,
    scale_rewards: Scale | AdvantageFn = "group",
    **tunables: Unpack[Tunables],
) -> Algorithm:
    """Return DAPO (arXiv:2503.14476): GRPO with clip-higher and the mean over all tokens.

        J = 1 / (sum_i |y_i|) sum_i sum_t min(r A, clip(r, 1-low, 1+high) A)

    Its other parts act on the rollout: `funcrl.drop_zero_variance` (dynamic sampling),
    `funcrl.mask_truncated` and `funcrl.rewards.soft_overlong`.

    Args:
        clip: as in `grpo`; (0.2, 0.28) in the paper.
        dual_clip: as in `grpo`.
        scale_rewards: as in `grpo`.
        tunables: see `Tunables`.

    Example:
        >>> import torch, funcrl
        >>> funcrl.dapo().weight(torch.tensor([[False, True, True]]))
        tensor([[0.0000, 0.5000, 0.5000]])
    """
    surrogate = surrogates.clipped(*clip, dual_clip=dual_clip)
    return _compose(tunables, scale_rewards, ratios.token, surrogate, aggregation.token_mean)


@checked
def gspo(
    *,
    clip: tuple[float, float] = (3e-4, 4e-4),
    scale_rewards: Scale | AdvantageFn = "group",
    **tunables: Unpack[Tunables],
) -> Algorithm:
    """Return GSPO (arXiv:2507.18071): GRPO with one ratio for a whole completion.

        s_i = (pi(y_i) / pi_behavior(y_i))^(1/|y_i|)
        J = mean_i min(s_i A_i, clip(s_i, 1-low, 1+high) A_i)

    Args:
        clip: as in `grpo`, much tighter; (3e-4, 4e-4) in the paper.
        scale_rewards: as in `grpo`.
        tunables: see `Tunables`.

    Example:
        >>> import funcrl
        >>> funcrl.gspo().ratio is funcrl.ratios.sequence
        True
    """
    surrogate = surrogates.clipped(*clip)
    return _compose(tunables, scale_rewards, ratios.sequence, surrogate, aggregation.sequence_mean)


@checked
def cispo(
    *,
    clip: tuple[float, float] = (1.0, 4.0),
    scale_rewards: Scale | AdvantageFn = "group",
    **tunables: Unpack[Tunables],
) -> Algorithm:
    """Return CISPO (MiniMax-M1, arXiv:2506.13585): REINFORCE under a clipped, constant ratio.

        J = 1 / (sum_i |y_i|) sum_i sum_t stop_gradient(clip(r, 1-low, 1+high)) A log pi(y_t)

    Args:
        clip: (low, high) around 1. The paper bounds above only and tunes it; (1, 4) is no lower
            bound and at most 5, the cap that TRL suggests.
        scale_rewards: as in `grpo`.
        tunables: see `Tunables`.

    Example:
        >>> import torch, funcrl
        >>> surrogate = funcrl.cispo().surrogate
        >>> surrogate(torch.tensor([-2.0]), torch.tensor([9.0]), torch.tensor([1.0])).objective
        tensor([-10.])
    """
    surrogate = surrogates.clipped_weight(*clip)
    return _compose(tunables, scale_rewards, ratios.token, surrogate, aggregation.token_mean)


@checked
def sapo(
    *,
    temperature: tuple[float, float] = (1.0, 1.05),
    scale_rewards: Scale | AdvantageFn = "group",
    **tunables: Unpack[Tunables],
) -> Algorithm:
    """Return SAPO (arXiv:2511.20347): GRPO with a sigmoid gate in place of the clip.

        J = mean_i (1/|y_i|) sum_t f(r) A,   f(r) = sigmoid(tau (r - 1)) 4 / tau

    Args:
        temperature: tau for A > 0 and for the rest; (1.0, 1.05) in the paper.
        scale_rewards: as in `grpo`.
        tunables: see `Tunables`.

    Example:
        >>> import torch, funcrl
        >>> one = torch.ones(1)
        >>> funcrl.sapo().surrogate(torch.zeros(1), one, one).objective
        tensor([2.])
    """
    surrogate = surrogates.soft_gate(*temperature)
    return _compose(tunables, scale_rewards, ratios.token, surrogate, aggregation.sequence_mean)


@checked
def rloo(**tunables: Unpack[Tunables]) -> Algorithm:
    """Return RLOO (arXiv:2402.14740): REINFORCE with the other samples' mean as the baseline.

        J = mean_i (R_i - mean_{j != i} R_j) log pi(y_i),   log pi(y) = sum_t log pi(y_t)

    The samples are taken to be on-policy unless a `correction` is given. The paper takes its KL
    penalty off the reward; here it is a loss like everywhere else.

    Args:
        tunables: see `Tunables`.

    Example:
        >>> import torch, funcrl
        >>> funcrl.rloo().advantage(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]))
        tensor([-2.,  2.])
    """
    advantage = advantages.by_group(advantages.leave_one_out)
    weight = partial(aggregation.constant, length=1)
    return _compose(tunables, advantage, ratios.token, surrogates.score_function, weight)


@checked
def reinforce(*, advantage: AdvantageFn | None = None, **tunables: Unpack[Tunables]) -> Algorithm:
    """Return REINFORCE (Williams 1992).

        J = mean_i R_i log pi(y_i),   log pi(y) = sum_t log pi(y_t)

    The samples are taken to be on-policy unless a `correction` is given.

    Args:
        advantage: `(rewards [B], group [B]) -> [B]`, the reward itself when left out; for the
            group's mean as a baseline `funcrl.advantages.by_group(funcrl.advantages.center)`.
        tunables: see `Tunables`.

    Example:
        >>> import torch, funcrl
        >>> funcrl.reinforce().advantage(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]))
        tensor([1., 3.])
    """
    weight = partial(aggregation.constant, length=1)
    advantage = advantage or advantages.by_group(advantages.raw)
    return _compose(tunables, advantage, ratios.token, surrogates.score_function, weight)


@checked
def ppo(
    *,
    clip: tuple[float, float] = (0.2, 0.2),
    value: NotNegative = 0.1,
    value_clip: Positive = 0.2,
    **tunables: Unpack[Tunables],
) -> Algorithm:
    """Return PPO with a critic (arXiv:1707.06347), for `grpo_step(prepare=funcrl.gae())`.

        J = 1 / (sum_i |y_i|) sum_i sum_t min(r A_t, clip(r) A_t) - value error(V_t, returns_t)

    The critic is one more output of the model function, `funcrl.logprob_fn(model, critic=True)`;
    `funcrl.gae` makes advantages and returns of what it expects and of the rewards.

    Args:
        clip: as in `grpo`.
        value: coefficient of the mean over tokens of `funcrl.losses.clipped_value` (TRL's
            `vf_coef`).
        value_clip: how far a value may move in one rollout (TRL's `cliprange_value`).
        tunables: see `Tunables`.

    Example:
        >>> import funcrl
        >>> model = funcrl.models.Transformer(funcrl.models.shape("micro", vocab_size=13))
        >>> model_fn = funcrl.logprob_fn(model, chunk=64, critic=True)
        >>> step = funcrl.grpo_step(model_fn, algorithm=funcrl.ppo(), prepare=funcrl.gae())
        >>> params = funcrl.models.with_critic(funcrl.init_params(model, seed=0), width=64)
        >>> state = step.init(params)
    """
    raw = advantages.by_group(advantages.raw)
    composed = _compose(
        tunables, raw, ratios.token, surrogates.clipped(*clip), aggregation.token_mean
    )
    return composed._replace(
        value_weight=aggregation.scaled(aggregation.token_mean, value),
        value_cost=losses.clipped_value(value_clip),
    )


@checked
def sft(*, weight: WeightFn | None = None) -> Algorithm:
    """Return supervised training: cross-entropy on the tokens of the mask, as they are.

        L = -1 / (sum_i |y_i|) sum_i sum_t log pi(y_t)

    There is no policy gradient: rewards and behaviour log-probabilities are not read.

    Args:
        weight: `(mask [B, T], dtype) -> token weights` of the cross-entropy, the mean over tokens
            when left out.

    Example:
        >>> import funcrl
        >>> step = funcrl.grpo_step(lambda params, sample: ..., algorithm=funcrl.sft())
    """
    return reinforce()._replace(weight=(), ce_weight=weight or aggregation.token_mean)


@checked
def distill(*, weight: WeightFn | None = None) -> Algorithm:
    """Return on-policy distillation alone: the divergence from a teacher (arXiv:2306.13649).

        L = 1 / (sum_i |y_i|) sum_i sum_t D(pi(. | y_<t), teacher(. | y_<t))

    D is what the `model_fn` scores, `funcrl.logprob_fn(model, teacher=...)`, or the estimate of
    KL(pi, teacher) from a batch's `teacher_logprobs`. Rewards are not read; an algorithm with
    both is one such as `funcrl.grpo(teacher=0.5)`.

    Args:
        weight: `(mask [B, T], dtype) -> token weights` of the divergence, the mean over tokens when
            left out.

    Example:
        >>> import funcrl
        >>> step = funcrl.grpo_step(lambda params, sample: ..., algorithm=funcrl.distill())
    """
    return reinforce()._replace(weight=(), teacher_weight=weight or aggregation.token_mean)


def _compose(
    tunables: Tunables,
    advantage: Scale | AdvantageFn,
    ratio: RatioFn,
    surrogate: SurrogateFn,
    weight: WeightFn,
) -> Algorithm:
    correction, teacher = tunables.get("correction"), tunables.get("teacher", 0.0)
    return Algorithm(
        advantage=advantage if callable(advantage) else _SCALES[advantage],
        ratio=ratio if correction is None else ratios.corrected(ratio, correction),
        surrogate=surrogate,
        penalty=losses.penalty(
            tunables.get("kl", 0.0),
            tunables.get("kl_estimator", "k3"),
            tunables.get("entropy", 0.0),
        ),
        weight=tunables.get("weight", weight),
        teacher_weight=aggregation.scaled(aggregation.token_mean, teacher) if teacher else (),
    )
