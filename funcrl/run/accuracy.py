"""What rows of metrics say of held-out prompts, which numbers a view shows, and the time left."""

import math
import time
from collections.abc import Mapping
from typing import Any

from funcrl.core.printing import escaped
from funcrl.run.runs import Row

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


LABEL = 24  # characters of a reward's own name
_SHOWN = {
    "reward": "reward", "loss/cross_entropy": "loss", "loss/teacher": "teacher",
    "completions/mean_length": "length", "entropy": "entropy", "kl": "kl",
    "grad_norm": "grad norm",
}  # fmt: skip


def shown_numbers(row: Row, evaluated: tuple[str, float] | None) -> list[tuple[str, float | None]]:
    """Return labels and values of a row, what it was evaluated by after the reward.

    Args:
        row: of metrics.jsonl.
        evaluated: the name and the value of `held_out`, perhaps of an earlier row.
    """
    found: list[tuple[str, float | None]] = [
        (label, row[name]) for name, label in _SHOWN.items() if name in row
    ]
    after_reward = 1 if "reward" in row else 0
    return found[:after_reward] + ([] if evaluated is None else [evaluated]) + found[after_reward:]


class Pace:
    """Measures the time of steps, and estimates the time left."""

    def __init__(self, total: int, done: int) -> None:
        self.total, self._done, self._first = total, done, done
        self._started = time.monotonic()

    def tick(self, row: Row) -> None:
        """Note that a step is done."""
        self._done = int(row["step"])

    def left(self) -> str:
        """Return the time left, as far as the steps so far tell."""
        steps = self._done - self._first
        if self._done >= self.total:
            return "0:00"
        if steps < 3:  # the first ones compile, or fill caches
            return "?"
        each = (time.monotonic() - self._started) / steps
        seconds = round(each * (self.total - self._done))
        minutes, seconds = divmod(seconds, 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


def short(value: Any) -> str:
    """Return a number in a few characters."""
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def remark(row: Row) -> str:
    """Return why a step has not changed the policy; "" where it has."""
    equal = row.get("frac_reward_zero_std") == 1 and row.get("num_tokens") == 0
    return "no update: the rewards of each group are equal" if equal else ""


def visible(text: str, room: int) -> str:
    """Return text with control characters escaped, of at most `room` characters."""
    shown = escaped(text)
    return shown if len(shown) <= room else shown[: room - 1] + "…"


_Z = 1.959963984540054  # of a normal distribution's middle 95%


def wilson(share: float, count: float) -> tuple[float, float]:
    """Return Wilson's 95% score interval for the chance of an event that a share of tosses had.

    It stays in [0, 1] and is right near its ends. With p the share and n the count,

        (p + z^2 / 2n +- z sqrt(p (1 - p) / n + z^2 / 4n^2)) / (1 + z^2 / n)

    Args:
        share: in [0, 1].
        count: the number of independent tosses, above 0; it may be an effective number.
    """
    square = _Z * _Z
    half = _Z * math.sqrt(share * (1 - share) / count + square / (4 * count * count))
    center, scale = share + square / (2 * count), 1 + square / count
    # With p at an end of [0, 1] rounding would leave it out.
    low, high = min((center - half) / scale, share), max((center + half) / scale, share)
    return max(low, 0.0), min(high, 1.0)
