"""The interval of a logged accuracy."""

from collections.abc import Mapping
from typing import Any

from funcrl.core.intervals import wilson


def interval_of(row: Mapping[str, Any]) -> tuple[float, float] | None:
    """Return the 95% interval of a row's held-out accuracy, None where it has none.

    The row has one sample of each prompt. Where samples are right in part, the interval is wider
    than it need be.
    """
    accuracy, count = row.get("eval/accuracy"), row.get("eval/num_prompts")
    if accuracy is None or count is None or not (0 <= accuracy <= 1 and count >= 1):
        return None
    return wilson(accuracy, count)
