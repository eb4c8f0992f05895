"""From counter buffers to Prometheus series: the one place that knows which cells make up which value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum
from itertools import product
from typing import NamedTuple

from prometheus_client.mmap_dict import mmap_key

from kvplugin.metrics.definitions import ARM, METRICS
from kvplugin.metrics.metric import Buffer, LabelValue, Metric

Snapshot = Sequence[Sequence[int]]
"""A counter buffer on the host, ``[rows][columns]``, whatever leading dimensions it had added up."""


class CounterSeries(NamedTuple):
    """One time series of a counter and the cells of its buffer that add up to it."""

    metric: Metric
    labels: tuple[str, ...]
    cells: tuple[tuple[int, int], ...]

    @property
    def key(self) -> str:
        """Name of the series in a metric file."""
        return series_key(self.metric, self.labels)

    def total(self, snapshot: Snapshot) -> int:
        """The series' value when its buffer reads ``snapshot``."""
        return sum(snapshot[row][column] for row, column in self.cells)


def counter_series(buffers: Collection[Buffer], arm: str) -> tuple[CounterSeries, ...]:
    """All series that are read from these buffers, for one arm, whatever their value."""
    return tuple(
        CounterSeries(metric, tuple(value.text for value in values), _cells(metric.buffer, metric.columns, values))
        for metric in METRICS
        if metric.buffer is not None and metric.buffer in buffers
        for values in combinations(metric, arm)
    )


def combinations(metric: Metric, arm: str) -> Iterator[tuple[LabelValue, ...]]:
    """All label values of a metric's series, for one arm."""
    return product(*((LabelValue(arm, ""),) if label is ARM else label.values for label in metric.labels))


def series_key(metric: Metric, labels: Sequence[str]) -> str:
    """Key under which prometheus_client's multiprocess collector finds a series in a metric file."""
    return mmap_key(metric.family, metric.name, [label.name for label in metric.labels], list(labels), metric.help)


def _cells(buffer: Buffer, only: Sequence[IntEnum], combination: Sequence[LabelValue]) -> tuple[tuple[int, int], ...]:
    rows, columns = set(range(buffer.rows)), set(only or buffer.columns)
    for value in combination:
        rows &= rows if value.rows is None else set(value.rows)
        columns &= columns if value.columns is None else set(value.columns)
    return tuple(product(sorted(rows), sorted(columns)))
