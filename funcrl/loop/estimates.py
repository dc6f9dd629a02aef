"""Statistics of an evaluation: the interval of an accuracy, pass@k and majority@k."""

import math
from collections import Counter
from collections.abc import Sequence

from funcrl.core import checks
from funcrl.core.intervals import wilson


def interval(values: Sequence[float], num_samples: int = 1) -> tuple[float, float]:
    """Return the 95% confidence interval of a mean of independent values in [0, 1].

    Wilson's score interval for n tosses of a coin. Samples of one prompt are correlated, so n is
    the number of tosses whose mean has the variance of the values' mean. With p that mean, N
    values, s^2 their unbiased variance, and m samples in each,

        n = min(1 + N p (1 - p) / s^2, N m),    N if the values are all equal
    """
    checks.check_count("interval", "the number of values", len(values))
    checks.check_count("interval", "num_samples", num_samples)
    for value in values:
        checks.check_range("interval", "a value", value, 0.0, 1.0)
    count, p = len(values), math.fsum(values) / len(values)
    square_sum = math.fsum((value - p) ** 2 for value in values)
    n = float(count)
    if square_sum > 1e-12 * count:  # not only rounding
        n = min(1 + count * p * (1 - p) * (count - 1) / square_sum, count * num_samples)
    return wilson(p, n)


def pass_at(num_samples: int, num_right: int, k: int) -> float:
    """Return the unbiased estimate of the chance that one of k samples is right.

    Of n samples that were drawn for a prompt c are right:

        1 - C(n - c, k) / C(n, k)      (arXiv:2107.03374)
    """
    checks.check_range("pass_at", "num_right", num_right, 0, num_samples)
    checks.check_range("pass_at", "k", k, 1, num_samples)
    return 1.0 - math.comb(num_samples - num_right, k) / math.comb(num_samples, k)


def majority(answers: Sequence[str], right: Sequence[bool]) -> float:
    """Return how often the most frequent answer is right; of equally frequent ones, the mean.

    An empty answer has no vote.
    """
    if len(answers) != len(right):
        raise ValueError(f"majority expects {len(answers)} judgements, got {len(right)}.")
    votes = Counter(answer for answer in answers if answer)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    # A mean over samples, because one answer may be judged right once and wrong once.
    judged = [
        judgement for answer, judgement in zip(answers, right, strict=True) if answer in winners
    ]
    return sum(judged) / len(judged) if judged else 0.0
