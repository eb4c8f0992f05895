from __future__ import annotations

import math
import random

import pytest

from kvplugin.requests.comparison import (
    ArmFigures,
    Distribution,
    distribution,
    mean_difference,
    mean_estimate,
    rate_estimate,
    verdict,
)

BOUNDS = (*(i / 100 for i in range(1, 200)), math.inf)


def observed(values: list[float]) -> Distribution:
    counts = [0.0] * len(BOUNDS)
    for value in values:
        counts[next(i for i, bound in enumerate(BOUNDS) if value <= bound)] += 1
    return Distribution(BOUNDS, tuple(counts), sum(values))


def arm(values: list[float]) -> ArmFigures:
    return ArmFigures(len(values), {"end to end": observed(values)}, {}, {})


def drawn(mean: float, count: int, seed: int) -> list[float]:
    draw = random.Random(seed)
    return [max(0.0, draw.gauss(mean, 0.1)) for _ in range(count)]


def test_buckets_come_cumulative() -> None:
    found = distribution({0.1: 3.0, math.inf: 7.0, 1.0: 5.0}, 4.2)
    assert found == Distribution((0.1, 1.0, math.inf), (3.0, 2.0, 2.0), 4.2)
    assert found.mean == pytest.approx(0.6)
    assert found.quantile(0.5) == pytest.approx(0.325)
    assert found.quantile(0.99) == 1.0, "beyond the last bound nothing is known"


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    held = sum((e := mean_estimate(observed(drawn(0.5, 150, seed)), 150)).low <= 0.5 <= e.high for seed in range(200))
    assert 180 <= held <= 199
    draw = random.Random(3)
    hits = [sum(draw.random() < 0.9 for _ in range(100)) for _ in range(300)]
    held = sum((e := rate_estimate(hit, 100, 100)).low <= 0.9 <= e.high for hit in hits)
    assert 276 <= held <= 299


def test_a_difference_is_only_claimed_where_there_is_one() -> None:
    same = {"a": arm(drawn(0.5, 400, 1)), "b": arm(drawn(0.5, 400, 2))}
    assert verdict(same, "a") == ["no difference in latency that is larger than chance"]
    slower = {"a": same["a"], "b": arm(drawn(0.6, 400, 5))}
    (said,) = verdict(slower, "a")
    assert said.startswith("b: end to end is ")
    assert "higher than a's" in said
    difference = mean_difference(slower["b"].latencies["end to end"], 400, slower["a"].latencies["end to end"], 400)
    assert difference.low <= 0.2 <= difference.high


def test_few_requests_give_no_verdict() -> None:
    assert verdict({"a": arm(drawn(0.1, 400, 1)), "b": arm(drawn(0.9, 20, 2))}, "a") == [
        "too few requests for a verdict: b 20; wait for 100 of each arm"
    ]


def test_nothing_counted_is_no_number() -> None:
    nothing = Distribution((math.inf,), (0.0,), 0.0)
    assert math.isnan(nothing.mean)
    assert math.isnan(nothing.quantile(0.5))
    assert math.isnan(mean_estimate(nothing, 0).low)
    assert math.isnan(rate_estimate(0, 0, 10).value)
    assert math.isnan(mean_difference(nothing, 0, nothing, 0).value)
