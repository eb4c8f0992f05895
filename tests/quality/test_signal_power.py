"""How well a signal tells damage from health: the statistics, on values that are known."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from integration.quality.signal_power import power, roc_area, window_means

LEVEL = [[0.5, 0.4, 0.6, 0.5] * 32] * 3


def shifted(by: float) -> list[list[float]]:
    return [[value + by for value in run] for run in LEVEL]


@given(
    low=st.lists(st.integers(0, 4), min_size=1, max_size=12), high=st.lists(st.integers(0, 4), min_size=1, max_size=12)
)
def test_roc_area_counts_pairs(low: list[int], high: list[int]) -> None:
    pairs = [(b > a) + (b == a) / 2 for a, b in product(low, high)]
    assert roc_area(low, high) == pytest.approx(sum(pairs) / len(pairs))


def test_windows_are_whole_and_of_one_run() -> None:
    assert window_means([[1, 3, 5, 7, 100], [9], [2, 4]], 2) == [2, 6, 3]


@pytest.mark.parametrize("by", [0.3, -0.3])
def test_a_large_change_is_seen_at_once_in_either_direction(by: float) -> None:
    found = power(LEVEL, shifted(by))
    assert found is not None
    assert (found.window, found.area, found.caught.value) == (8, 1.0, 1.0)
    assert found.damaged - found.healthy == pytest.approx(by)


def test_no_change_raises_no_alarm() -> None:
    found = power(LEVEL, LEVEL)
    assert found is not None
    assert (found.window, found.area, found.caught.value) == (None, 0.5, 0.0)


def test_a_change_that_shows_in_larger_windows_only() -> None:
    """Values swing so much that eight of them say little; the mean of many does."""
    swing = [[0.0] * 16 + [1.0] * 16] * 8
    healthy = [[value for part in swing for value in part]]
    found = power(healthy, [[value * 0.5 + 0.4 for value in healthy[0]]])
    assert found is not None
    assert found.window == 32


def test_too_few_values_say_nothing() -> None:
    assert power([[0.1] * 7], [[0.9] * 7]) is None
    assert power([[]], [[0.9] * 8]) is None
