"""From counter buffers to Prometheus series: the one place that knows which cells make up which value."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from prometheus_client.mmap_dict import mmap_key

from kvplugin.metrics.definitions import ARM, METRICS
from kvplugin.metrics.metric import Buffer, LabelValue, Metric
from kvplugin.topology.counters import PHASE_ROWS, Counter

Snapshot = Sequence[Sequence[int]]
"""A counter buffer on the host, ``[2][len(Counter)]``."""


class CounterSeries(NamedTuple):
    """One time series of a counter and the cells of its buffer that add up to it."""

    metric: Metric
    buffer: Buffer
    labels: tuple[str, ...]
    cells: tuple[tuple[int, Counter], ...]

    @property
    def key(self) -> str:
        """Name of the series in a metric file."""
        return series_key(self.metric, self.labels)

    def total(self, snapshot: Snapshot) -> int:
        """The series' value when its buffer reads ``snapshot``."""
        return sum(snapshot[row][column] for row, column in self.cells)


def counter_series(arm: str) -> tuple[CounterSeries, ...]:
    """All series of all counters for one arm, whatever their value."""
    return tuple(
        CounterSeries(metric, metric.buffer, tuple(value.text for value in combination), _cells(combination))
        for metric in METRICS
        if metric.buffer is not None
        for combination in product(*(label.values for label in metric.labels))
        if all(value.text == arm for label, value in zip(metric.labels, combination, strict=True) if label is ARM)
    )


def series_key(metric: Metric, labels: Sequence[str]) -> str:
    """Key under which prometheus_client's multiprocess collector finds a series in a metric file."""
    return mmap_key(metric.family, metric.name, [label.name for label in metric.labels], list(labels), metric.help)


def _cells(combination: Sequence[LabelValue]) -> tuple[tuple[int, Counter], ...]:
    rows, columns = set(range(len(PHASE_ROWS))), set(Counter)
    for value in combination:
        rows &= rows if value.rows is None else set(value.rows)
        columns &= columns if value.columns is None else set(value.columns)
    return tuple(product(sorted(rows), sorted(columns)))
