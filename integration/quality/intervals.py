"""Intervals for what is measured: no figure of this package is shown without one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist, mean, stdev
from typing import NamedTuple

CONFIDENCE = 0.95


class Interval(NamedTuple):
    """A measured value and its confidence interval."""

    value: float
    low: float
    high: float

    @property
    def excludes_zero(self) -> bool:
        """True where the sign of the value is beyond doubt at this confidence."""
        return self.low > 0 or self.high < 0


def wilson(right: int, total: int, confidence: float = CONFIDENCE) -> Interval:
    """Wilson's score interval of a share: unlike the usual one it is honest near 0 and 1.

    It takes answers as independent; answers of one sequence are not quite, so it is a little too narrow.
    """
    if total == 0:
        return Interval(math.nan, 0.0, 1.0)
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    share, extra = right / total, z * z / total
    middle = share + extra / 2
    reach = z * math.sqrt(share * (1 - share) / total + extra / (4 * total))
    # At the ends the bounds are exactly 0 and 1; rounding may miss them.
    low = 0.0 if right == 0 else (middle - reach) / (1 + extra)
    high = 1.0 if right == total else (middle + reach) / (1 + extra)
    return Interval(share, low, high)


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean of independent values, such as differences that are paired by sequence, one value a sequence."""
    if not values:
        return Interval(math.nan, -math.inf, math.inf)
    centre = mean(values)
    if len(values) == 1:
        return Interval(centre, -math.inf, math.inf)
    reach = _student(confidence, len(values) - 1) * stdev(values) / math.sqrt(len(values))
    return Interval(centre, centre - reach, centre + reach)


def _student(confidence: float, freedom: int) -> float:
    """Student's quantile by Cornish and Fisher's expansion; from 5 degrees of freedom on its error is below 0.5 %."""
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / freedom + second / freedom**2 + third / freedom**3
