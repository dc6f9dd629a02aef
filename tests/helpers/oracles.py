"""Literal float64 loops over samples and tokens, each written from its paper's formula.

Every oracle takes lists of rows and returns the loss (minus the objective) as a float64 scalar
that autograd can differentiate with respect to `logprobs`.
"""

import torch
from torch import Tensor


def rows_of(mask: Tensor) -> list[list[int]]:
    """Return the sampled positions of each row."""
    return [[t for t in range(mask.shape[1]) if mask[i, t]] for i in range(mask.shape[0])]


def members(group: Tensor, i: int) -> list[int]:
    return [j for j in range(len(group)) if group[j] == group[i]]


def mean(values: list[Tensor]) -> Tensor:
    return sum(values) / len(values)


def standardized(rewards: Tensor, group: Tensor, i: int, eps: float = 1e-6) -> Tensor:
    own = [rewards[j] for j in members(group, i)]
    if all(r == own[0] for r in own):
        return torch.zeros((), dtype=torch.float64)
    center = mean(own)
    deviation = (sum((r - center) ** 2 for r in own) / (len(own) - 1)) ** 0.5
    return (rewards[i] - center) / (deviation + eps)


def centered(rewards: Tensor, group: Tensor, i: int) -> Tensor:
    return rewards[i] - mean([rewards[j] for j in members(group, i)])


def scaled_by_batch(rewards: Tensor, group: Tensor, i: int, eps: float = 1e-6) -> Tensor:
    center = mean(list(rewards))
    deviation = (sum((r - center) ** 2 for r in rewards) / (len(rewards) - 1)) ** 0.5
    return centered(rewards, group, i) / (deviation + eps)


def left_out(rewards: Tensor, group: Tensor, i: int) -> Tensor:
    return rewards[i] - mean([rewards[j] for j in members(group, i) if j != i])


def ppo(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    """min(r A, clip(r) A) by cases, so that the gradient of each case is plain."""
    if advantage > 0 and ratio > 1 + high:
        return (1 + high) * advantage
    if advantage < 0 and ratio < 1 - low:
        return (1 - low) * advantage
    return ratio * advantage


def k1(logprob: Tensor, ref: Tensor) -> Tensor:
    return logprob - ref


def k2(logprob: Tensor, ref: Tensor) -> Tensor:
    return (logprob - ref) ** 2 / 2


def k3(logprob: Tensor, ref: Tensor) -> Tensor:
    return torch.exp(ref - logprob) - (ref - logprob) - 1


class Inputs:
    """float64 copies of a case's tensors, and the sampled positions."""

    def __init__(self, case) -> None:
        wide = torch.float64
        self.logprobs = case.params["logprobs"].to(wide).clone().requires_grad_()
        self.entropy = case.params["entropy"].to(wide)
        self.behavior = case.rollout.behavior_logprobs.to(wide)
        self.ref = case.ref_logprobs.to(wide)
        self.rewards = case.rollout.rewards.to(wide)
        self.group = case.rollout.group
        self.rows = rows_of(case.rollout.mask)
        self.sequences = [i for i, row in enumerate(self.rows) if row]
        self.num_tokens = sum(len(row) for row in self.rows)

    def ratio(self, i: int, t: int) -> Tensor:
        return torch.exp(self.logprobs[i, t] - self.behavior[i, t])

    def zero(self) -> Tensor:
        return self.logprobs.sum() * 0


def grpo(
    x: Inputs, low=0.2, high=0.2, kl=0.0, entropy=0.0, estimator=k3, advantage=standardized
) -> Tensor:
    objective = x.zero()
    for i in x.sequences:
        for t in x.rows[i]:
            term = ppo(x.ratio(i, t), advantage(x.rewards, x.group, i), low, high)
            term = term - kl * estimator(x.logprobs[i, t], x.ref[i, t]) + entropy * x.entropy[i, t]
            objective = objective + term / len(x.rows[i]) / len(x.sequences)
    return -objective


def grpo_with_kl_gradient(x: Inputs, kl: float, estimator) -> Tensor:
    """Costs ratio * estimate, with the gradient ratio * (log pi - log ref) * grad log pi."""
    cost = x.zero()
    for i in x.sequences:
        for t in x.rows[i]:
            ratio = x.ratio(i, t).detach()
            value = estimator(x.logprobs[i, t], x.ref[i, t]).detach()
            slope = (x.logprobs[i, t] - x.ref[i, t]).detach()
            moving = slope * (x.logprobs[i, t] - x.logprobs[i, t].detach())
            cost = cost + kl * ratio * (value + moving) / len(x.rows[i]) / len(x.sequences)
    return grpo(x) + cost


def dr_grpo(x: Inputs, length=512.0) -> Tensor:
    objective = x.zero()
    for i in x.sequences:
        advantage = centered(x.rewards, x.group, i)
        for t in x.rows[i]:
            term = ppo(x.ratio(i, t), advantage, 0.2, 0.2)
            objective = objective + term / length / len(x.sequences)
    return -objective


def dapo(x: Inputs, dual=float("inf"), advantage=standardized) -> Tensor:
    objective = x.zero()
    for i in x.sequences:
        own = advantage(x.rewards, x.group, i)
        for t in x.rows[i]:
            bounded = own < 0 and x.ratio(i, t) > dual
            term = dual * own if bounded else ppo(x.ratio(i, t), own, 0.2, 0.28)
            objective = objective + term
    return -objective / x.num_tokens


def gspo(x: Inputs, low=3e-4, high=4e-4, advantage=standardized) -> Tensor:
    objective = x.zero()
    for i in x.sequences:
        log_ratio = sum(x.logprobs[i, t] - x.behavior[i, t] for t in x.rows[i])
        ratio = torch.exp(log_ratio / len(x.rows[i]))
        objective = objective + ppo(ratio, advantage(x.rewards, x.group, i), low, high)
    return -objective / len(x.sequences)


def cispo(x: Inputs, low=1.0, high=4.0, advantage=standardized) -> Tensor:
    objective = x.zero()
    for i in x.sequences:
        own = advantage(x.rewards, x.group, i)
        for t in x.rows[i]:
            weight = min(max(x.ratio(i, t).item(), 1 - low), 1 + high)
            objective = objective + weight * own * x.logprobs[i, t]
    return -objective / x.num_tokens


def sapo(x: Inputs, positive=1.0, negative=1.05, advantage=standardized) -> Tensor:
    objective = x.zero()
    for i in x.sequences:
        own = advantage(x.rewards, x.group, i)
        tau = positive if own > 0 else negative
        for t in x.rows[i]:
            gate = 1 / (1 + torch.exp(-tau * (x.ratio(i, t) - 1))) * 4 / tau
            objective = objective + gate * own / len(x.rows[i]) / len(x.sequences)
    return -objective


def rloo(x: Inputs) -> Tensor:
    objective = x.zero()
    for i in x.sequences:
        log_completion = sum(x.logprobs[i, t] for t in x.rows[i])
        objective = objective + left_out(x.rewards, x.group, i) * log_completion
    return -objective / len(x.sequences)


def reinforce(x: Inputs) -> Tensor:
    objective = x.zero()
    for i in x.sequences:
        objective = objective + x.rewards[i] * sum(x.logprobs[i, t] for t in x.rows[i])
    return -objective / len(x.sequences)


def dual_clip(x: Inputs, c=3.0) -> Tensor:
    """GRPO with verl's lower bound for tokens of a negative advantage."""
    objective = x.zero()
    for i in x.sequences:
        advantage = standardized(x.rewards, x.group, i)
        for t in x.rows[i]:
            ratio = x.ratio(i, t)
            term = ppo(ratio, advantage, 0.2, 0.2)
            if advantage < 0 and ratio > c:
                term = c * advantage
            objective = objective + term / len(x.rows[i]) / len(x.sequences)
    return -objective


def importance(x: Inputs, i: int, t: int, level: str) -> float:
    """The current policy over the behaviour, for a token or as the product over a completion."""
    where = [t] if level == "token" else x.rows[i]
    return torch.exp(sum((x.logprobs[i, u] - x.behavior[i, u]) for u in where)).item()


def corrected(x: Inputs, level: str, bound: str, cap: float) -> Tensor:
    """On-policy GRPO under a bounded importance weight (TIS, or MIS)."""
    objective = x.zero()
    for i in x.sequences:
        advantage = standardized(x.rewards, x.group, i)
        for t in x.rows[i]:
            weight = importance(x, i, t, level)
            weight = min(weight, cap) if bound == "truncated" else weight * (weight <= cap)
            on_policy = torch.exp(x.logprobs[i, t] - x.logprobs[i, t].detach())
            objective = objective + weight * on_policy * advantage / len(x.rows[i])
    return -objective / len(x.sequences)
