"""Confidence intervals."""

import math

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
