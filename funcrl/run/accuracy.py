"""What the rows of metrics.jsonl say of held-out prompts: an accuracy, or the mean of a reward."""

from collections.abc import Mapping
from typing import Any

from funcrl.core.intervals import wilson

_REWARDS = "eval/rewards/"


def named_mean(reward: str) -> str:
    """Return the metric that is the mean of a reward over held-out prompts."""
    return f"{_REWARDS}{reward}/mean"


def is_held_out_reward(name: str) -> bool:
    """Return whether a metric is the mean of a reward over held-out prompts."""
    return name.startswith(_REWARDS)


def reward_of(name: str) -> str:
    """Return the name of the reward of such a metric."""
    return name.removeprefix(_REWARDS).removesuffix("/mean")


def held_out(row: Mapping[str, Any]) -> tuple[str, float] | None:
    """Return the name and the value of what a row was evaluated by, None where it was not.

    That is its accuracy, or the mean of a reward that is not right or wrong, by its own name.
    """
    if row.get("eval/accuracy") is not None:
        return "accuracy", row["eval/accuracy"]
    for name, value in row.items():
        if is_held_out_reward(name) and value is not None:
            return reward_of(name), value
    return None


def score_of(row: Mapping[str, Any]) -> float | None:
    """Return the value that the best checkpoints are chosen by, None where a row has none."""
    found = held_out(row)
    return None if found is None else found[1]


def interval_of(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95% interval of a row's held-out accuracy, None where it has none.

    The row has one sample of each prompt. Where samples are right in part, the interval is wider
    than it need be.
    """
    accuracy, count = row.get("eval/accuracy"), row.get("eval/num_prompts")
    if accuracy is None or count is None or not (0 <= accuracy <= 1 and count >= 1):
        return None
    return wilson(accuracy, count)
