from __future__ import annotations

import math

import pytest

from integration.quality.intervals import mean_interval, wilson


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    # From R: prop.test(right, total, correct = FALSE)$conf.int
    [(0, 10, 0.0, 0.2775328), (10, 10, 0.7224672, 1.0), (81, 263, 0.2553014, 0.3662060), (5, 10, 0.2365931, 0.7634069)],
)
def test_wilson(right: int, total: int, low: float, high: float) -> None:
    found = wilson(right, total)
    assert found.value == right / total
    assert found.low == pytest.approx(low, abs=1e-4)
    assert found.high == pytest.approx(high, abs=1e-4)


def test_wilson_of_nothing_knows_nothing() -> None:
    assert wilson(0, 0)[1:] == (0.0, 1.0)


@pytest.mark.parametrize(("count", "quantile"), [(6, 2.5706), (11, 2.2281), (61, 2.0003)])
def test_mean_interval_has_student_width(count: int, quantile: float) -> None:
    values = [float(number % 3) for number in range(count)]
    found = mean_interval(values)
    spread = math.sqrt(sum((value - found.value) ** 2 for value in values) / (count - 1) / count)
    assert (found.high - found.low) / 2 == pytest.approx(quantile * spread, rel=6e-3)


def test_few_values_have_wide_intervals() -> None:
    assert mean_interval([]).low == -math.inf
    assert not mean_interval([3.0]).excludes_zero
    assert mean_interval([1.0, 1.0]).excludes_zero
