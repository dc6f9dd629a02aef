"""Surrogate objectives per token: functions `(logprobs, ratio, advantages) -> Surrogate`.

Every objective is positively homogeneous in the advantage, so that a non-negative importance
weight may multiply the advantage instead of the objective.
"""

import torch
from torch import Tensor

from funcrl.core import checks
from funcrl.core.arguments import Fraction, NotNegative, Positive, checked
from funcrl.core.printing import remembers
from funcrl.core.types import Surrogate, SurrogateFn


@checked
@remembers
def clipped(
    low: Fraction = 0.2, high: NotNegative = 0.2, dual_clip: float | None = None
) -> SurrogateFn:
    """Return PPO's pessimistic clipped objective (arXiv:1707.06347), at `1 - low` and `1 + high`.

        min(r A, clip(r, 1 - low, 1 + high) A)
        and for A < 0 with `dual_clip` c, at least c A (arXiv:1912.09729)

    Args:
        low: how far below 1 the ratio may fall before its gradient stops.
        high: how far above 1 it may rise; larger than `low` is DAPO's "clip-higher".
        dual_clip: bounds the loss of a token with a negative advantage; above `1 + high`.

    Example:
        >>> import torch, funcrl
        >>> surrogate = funcrl.surrogates.clipped(0.2, 0.2)
        >>> ratio, advantages = torch.tensor([1.5, 0.5]), torch.tensor([1.0, -1.0])
        >>> surrogate(ratio.log(), ratio, advantages).objective
        tensor([ 1.2000, -0.8000])
    """
    if dual_clip is not None and not dual_clip > 1 + high:
        raise ValueError(f"clipped expects dual_clip > 1 + high = {1 + high}, got {dual_clip}.")

    @checked
    def surrogate(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Surrogate:
        del logprobs
        checks.check_shape("clipped", "advantages", advantages, "ratio", ratio.shape)
        bounded = ratio.clamp(1 - low, 1 + high)
        objective = torch.minimum(ratio * advantages, bounded * advantages)
        clipped_low = (ratio < 1 - low) & (advantages < 0)
        clipped_high = (ratio > 1 + high) & (advantages > 0)
        if dual_clip is not None:
            floor = torch.maximum(objective, dual_clip * advantages)
            objective = torch.where(advantages < 0, floor, objective)
            clipped_high = clipped_high | ((ratio > dual_clip) & (advantages < 0))
        return Surrogate(objective, clipped_low, clipped_high)

    return surrogate


@checked
@remembers
def clipped_weight(low: Fraction = 1.0, high: NotNegative = 4.0) -> SurrogateFn:
    """Return CISPO's objective (arXiv:2506.13585): a clipped, constant weight on the log-prob.

        stop_gradient(clip(r, 1 - low, 1 + high)) A log pi

    No token loses its gradient. With `low=1` there is no lower bound.

    Args:
        low: the weight is at least `1 - low`.
        high: the weight is at most `1 + high`.

    Example:
        >>> import torch, funcrl
        >>> surrogate = funcrl.surrogates.clipped_weight(1.0, 4.0)
        >>> ratio = torch.tensor([9.0, 0.5])
        >>> surrogate(torch.tensor([-1.0, -1.0]), ratio, torch.tensor([1.0, 1.0])).objective
        tensor([-5.0000, -0.5000])
    """

    @checked
    def surrogate(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Surrogate:
        checks.check_shape("clipped_weight", "logprobs", logprobs, "ratio", ratio.shape)
        checks.check_shape("clipped_weight", "advantages", advantages, "ratio", ratio.shape)
        constant = ratio.detach()
        weight = constant.clamp(1 - low, 1 + high)
        return Surrogate(weight * advantages * logprobs, constant < 1 - low, constant > 1 + high)

    return surrogate


@checked
@remembers
def soft_gate(positive: Positive = 1.0, negative: Positive = 1.05) -> SurrogateFn:
    """Return SAPO's objective (arXiv:2511.20347): a sigmoid in place of the clip.

        f(r) A   with   f(r) = sigmoid(tau (r - 1)) 4 / tau

    where tau is `positive` for A > 0 and `negative` otherwise. At r = 1 the slope is 1.

    Args:
        positive: the temperature for tokens with a positive advantage.
        negative: the temperature for the others; larger decays faster.

    Example:
        >>> import torch, funcrl
        >>> surrogate = funcrl.surrogates.soft_gate()
        >>> surrogate(torch.zeros(1), torch.ones(1), torch.ones(1)).objective
        tensor([2.])
    """

    @checked
    def surrogate(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Surrogate:
        del logprobs
        checks.check_shape("soft_gate", "advantages", advantages, "ratio", ratio.shape)
        up = torch.sigmoid(positive * (ratio - 1)) * (4 / positive)
        down = torch.sigmoid(negative * (ratio - 1)) * (4 / negative)
        gate = torch.where(advantages > 0, up, down)
        return _unclipped(gate * advantages)

    return surrogate


@checked
def score_function(logprobs: Tensor, ratio: Tensor, advantages: Tensor) -> Surrogate:
    """Return REINFORCE's objective `A log pi` (Williams 1992); the ratio is not used.

    Example:
        >>> import torch, funcrl
        >>> logprobs, advantages = torch.tensor([-1.0, -2.0]), torch.tensor([1.0, 3.0])
        >>> funcrl.surrogates.score_function(logprobs, logprobs.exp(), advantages).objective
        tensor([-1., -6.])
    """
    del ratio
    checks.check_shape("score_function", "advantages", advantages, "logprobs", logprobs.shape)
    return _unclipped(advantages * logprobs)


def _unclipped(objective: Tensor) -> Surrogate:
    never = torch.zeros_like(objective, dtype=torch.bool)
    return Surrogate(objective, never, never)
