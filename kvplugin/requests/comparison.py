"""Arms side by side, from what Prometheus counted: means and rates with intervals, and whether samples suffice."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist

ENOUGH = 100
"""Requests of an arm below which no difference is claimed."""
Z = NormalDist().inv_cdf(0.975)


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Distribution:
    """A histogram of one arm.

    Attributes:
        bounds: upper bounds in ascending order, the last one infinite.
        counts: values in each bucket, not cumulative.
        total: sum of all values.
    """

    bounds: tuple[float, ...]
    counts: tuple[float, ...]
    total: float

    @property
    def count(self) -> float:
        """Values."""
        return math.fsum(self.counts)

    @property
    def mean(self) -> float:
        """Their mean; NaN without values."""
        return self.total / self.count if self.count else math.nan

    @property
    def variance(self) -> float:
        """Their variance, with each value in the middle of its bucket, or at the lower bound of the last one."""
        lower = (0.0, *self.bounds[:-1])
        middles = [low if math.isinf(high) else (low + high) / 2 for low, high in zip(lower, self.bounds, strict=True)]
        if self.count < 2:
            return math.nan
        centre = math.fsum(n * x for n, x in zip(self.counts, middles, strict=True)) / self.count
        return math.fsum(n * (x - centre) ** 2 for n, x in zip(self.counts, middles, strict=True)) / (self.count - 1)

    def quantile(self, q: float) -> float:
        """A quantile, linear inside its bucket, as Prometheus has it; NaN without values."""
        rank, seen = q * self.count, 0.0
        if not self.count:
            return math.nan
        lower = 0.0
        for high, count in zip(self.bounds, self.counts, strict=True):
            if count and seen + count >= rank:
                return lower if math.isinf(high) else lower + (high - lower) * (rank - seen) / count
            seen, lower = seen + count, high if not math.isinf(high) else lower
        return lower


@dataclass(frozen=True)
class ArmFigures:
    """What was counted of one arm in a window.

    Attributes:
        requests: that ended.
        latencies: by name.
        tokens: by name.
        rates: (part, whole) by name.
    """

    requests: float
    latencies: Mapping[str, Distribution]
    tokens: Mapping[str, float]
    rates: Mapping[str, tuple[float, float]]


def mean_estimate(values: Distribution, requests: float) -> Estimate:
    """Mean of a latency. Values of one request hang together: there are as many independent ones as requests."""
    spread = Z * math.sqrt(values.variance / requests) if requests else math.nan
    return Estimate(values.mean, values.mean - spread, values.mean + spread)


def mean_difference(
    arm: Distribution, arm_requests: float, baseline: Distribution, baseline_requests: float
) -> Estimate:
    """How much higher an arm's mean latency is, as a fraction of the baseline's."""
    if not (arm_requests and baseline_requests and baseline.mean):
        return Estimate(math.nan, math.nan, math.nan)
    spread = Z * math.sqrt(arm.variance / arm_requests + baseline.variance / baseline_requests) / baseline.mean
    value = arm.mean / baseline.mean - 1
    return Estimate(value, value - spread, value + spread)


def rate_estimate(part: float, whole: float, requests: float) -> Estimate:
    """A share of tokens, with Wilson's interval for as many independent samples as there were requests."""
    if not whole or not requests:
        return Estimate(math.nan, math.nan, math.nan)
    p, n = min(1.0, part / whole), requests
    centre = (p + Z**2 / (2 * n)) / (1 + Z**2 / n)
    spread = Z / (1 + Z**2 / n) * math.sqrt(p * (1 - p) / n + Z**2 / (4 * n**2))
    return Estimate(p, max(0.0, centre - spread), min(1.0, centre + spread))


def verdict(figures: Mapping[str, ArmFigures], baseline: str) -> list[str]:
    """What may be said of the arms, in sentences: too few samples, no difference found, or which one."""
    few = {arm: round(f.requests) for arm, f in figures.items() if f.requests < ENOUGH}
    if few:
        counted = ", ".join(f"{arm} {number}" for arm, number in few.items())
        return [f"too few requests for a verdict: {counted}; wait for {ENOUGH} of each arm"]
    said = []
    base = figures[baseline]
    for arm, found in figures.items():
        if arm == baseline:
            continue
        for name, values in found.latencies.items():
            difference = mean_difference(values, found.requests, base.latencies[name], base.requests)
            if difference.low > 0 or difference.high < 0:
                direction = "higher" if difference.value > 0 else "lower"
                said.append(
                    f"{arm}: {name} is {abs(difference.value):.1%} {direction} than {baseline}'s "
                    f"({difference.low:+.1%} to {difference.high:+.1%})"
                )
    return said or ["no difference in latency that is larger than chance"]


def distribution(cumulative: Mapping[float, float], total: float) -> Distribution:
    """From Prometheus' cumulative buckets."""
    bounds = tuple(sorted(cumulative))
    steps: Sequence[float] = [cumulative[bound] for bound in bounds]
    counts = tuple(max(0.0, high - low) for low, high in zip((0.0, *steps[:-1]), steps, strict=True))
    return Distribution(bounds, counts, total)
