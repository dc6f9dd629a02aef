"""From prompts to a rollout: completions are drawn, graded and put into rows."""

from funcrl.loop.rollouts.draw import Completed, complete, to_rollout
from funcrl.loop.rollouts.grade import (
    Graded,
    RewardError,
    accuracies,
    comparable,
    grade,
    is_accuracy,
    judging_reward,
    named_rewards,
    punish_overlong,
)
from funcrl.loop.rollouts.log import to_completions

__all__ = [
    "Completed",
    "Graded",
    "RewardError",
    "accuracies",
    "comparable",
    "complete",
    "grade",
    "is_accuracy",
    "judging_reward",
    "named_rewards",
    "punish_overlong",
    "to_completions",
    "to_rollout",
]
