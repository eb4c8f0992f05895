"""How well a signal tells a damaged indexer from a healthy one: plain statistics over windows of values."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import NamedTuple

from integration.quality.intervals import Interval, wilson

WINDOWS = (8, 16, 32, 64, 128)
"""Values of a window, from the quickest alarm to the surest."""
ENOUGH = 0.95
"""Share of the damaged windows that have to raise the alarm."""


class Power(NamedTuple):
    """What one signal says of one damage.

    Attributes:
        healthy, damaged: means of all values.
        area: under the ROC curve of window means at the largest window; 1 = always on its side, 0.5 = says nothing.
        window: smallest window of which ``ENOUGH`` raise the alarm at a threshold that no healthy window crosses;
            None = none does.
        caught: share of the damaged windows of that size (else of the largest) that raise it.
        threshold: for that size.
    """

    healthy: float
    damaged: float
    area: float
    window: int | None
    caught: Interval
    threshold: float


def power(healthy: Sequence[Sequence[float]], damaged: Sequence[Sequence[float]]) -> Power | None:
    """Compare runs; None where a signal has too few values for any window."""
    if not window_means(healthy, WINDOWS[0]) or not window_means(damaged, WINDOWS[0]):
        return None
    before, after = (mean(value for run in runs for value in run) for runs in (healthy, damaged))
    rises = after > before
    found: Power | None = None
    for size in WINDOWS:
        well, ill = window_means(healthy, size), window_means(damaged, size)
        if not well or not ill:
            break
        threshold = max(well) if rises else min(well)
        caught = sum(value > threshold if rises else value < threshold for value in ill)
        area = roc_area(well, ill) if rises else roc_area(ill, well)
        enough = caught >= ENOUGH * len(ill)
        found = Power(before, after, area, size if enough else None, wilson(caught, len(ill)), threshold)
        if enough:
            break
    return found


def window_means(runs: Sequence[Sequence[float]], size: int) -> list[float]:
    """Means of all whole windows, none across two runs."""
    return [mean(run[i : i + size]) for run in runs for i in range(0, len(run) - size + 1, size)]


def roc_area(low: Sequence[float], high: Sequence[float]) -> float:
    """Probability that one of ``high`` is larger than one of ``low``; ties count half (Mann and Whitney)."""
    ranked = sorted((value, side) for side, values in enumerate((low, high)) for value in values)
    below, area, i = 0, 0.0, 0
    while i < len(ranked):
        j = i
        while j < len(ranked) and ranked[j][0] == ranked[i][0]:
            j += 1
        tied = [side for _, side in ranked[i:j]]
        lows, highs = tied.count(0), tied.count(1)
        area += highs * (below + lows / 2)
        below += lows
        i = j
    return area / (len(low) * len(high))
