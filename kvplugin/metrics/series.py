"""From counter buffers to Prometheus series: the one place that knows which cells make up which value."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import IntEnum
from itertools import chain, product
from typing import NamedTuple

from prometheus_client.mmap_dict import mmap_key
from prometheus_client.utils import floatToGoString

from kvplugin.metrics.definitions import ARM, METRICS
from kvplugin.metrics.metric import Buffer, LabelValue, Metric, MetricType

Snapshot = Sequence[Sequence[int]]
"""A counter buffer on the host, ``[rows][columns]``, whatever leading dimensions it had added up."""


class CounterSeries(NamedTuple):
    """One time series and the cells of its buffer that add up to it.

    Attributes:
        metric: that it belongs to.
        labels: values of the metric's labels.
        key: its name in a metric file.
        cells: (row, column) in the buffer.
        unit: what 1 in the cells stands for.
    """

    metric: Metric
    labels: tuple[str, ...]
    key: str
    cells: tuple[tuple[int, int], ...]
    unit: float = 1

    def total(self, snapshot: Snapshot) -> float:
        """The series' value when its buffer reads ``snapshot``."""
        return sum(snapshot[row][column] for row, column in self.cells) * self.unit


def counter_series(buffers: Collection[Buffer], arm: str) -> tuple[CounterSeries, ...]:
    """All series that are read from these buffers, for one arm, whatever their value."""
    return tuple(
        chain.from_iterable(
            _series_of(metric, metric.buffer, values)
            for metric in METRICS
            if metric.buffer is not None and metric.buffer in buffers
            for values in combinations(metric, arm)
        )
    )


def _series_of(metric: Metric, buffer: Buffer, values: Sequence[LabelValue]) -> Iterator[CounterSeries]:
    labels = tuple(value.text for value in values)
    rows, columns = _rows_and_columns(buffer, metric.columns, values)
    keys = series_keys(metric, labels)
    if metric.type is not MetricType.HISTOGRAM:
        yield CounterSeries(metric, labels, keys[0], tuple(product(rows, columns)))
        return
    for key, column in zip(keys, columns, strict=True):
        unit = metric.unit if key == keys[-1] else 1
        yield CounterSeries(metric, labels, key, tuple(product(rows, (column,))), unit)


def combinations(metric: Metric, arm: str) -> Iterator[tuple[LabelValue, ...]]:
    """All label values of a metric's series, for one arm."""
    return product(*((LabelValue(arm, ""),) if label is ARM else label.values for label in metric.labels))


def series_keys(metric: Metric, labels: Sequence[str]) -> tuple[str, ...]:
    """Keys under which prometheus_client's multiprocess collector finds what belongs together in a metric file.

    One for a counter or gauge. For a histogram those of its buckets, in ascending order, each holding the values
    between its bound and the one before, and that of its sum.
    """
    names = [label.name for label in metric.labels]
    if metric.type is not MetricType.HISTOGRAM:
        return (mmap_key(metric.family, metric.name, names, list(labels), metric.help),)
    bounds = [str(floatToGoString(bound)) for bound in (*metric.buckets, float("inf"))]  # type: ignore[no-untyped-call]
    bucket, total = f"{metric.name}_bucket", f"{metric.name}_sum"
    buckets = [mmap_key(metric.family, bucket, [*names, "le"], [*labels, bound], metric.help) for bound in bounds]
    return (*buckets, mmap_key(metric.family, total, names, list(labels), metric.help))


def _rows_and_columns(
    buffer: Buffer, only: Sequence[IntEnum], combination: Sequence[LabelValue]
) -> tuple[list[int], list[int]]:
    rows, columns = set(range(buffer.rows)), set(only or buffer.columns)
    for value in combination:
        rows &= rows if value.rows is None else set(value.rows)
        columns &= columns if value.columns is None else set(value.columns)
    return sorted(rows), sorted(columns)
