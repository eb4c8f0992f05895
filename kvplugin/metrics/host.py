"""Metrics that a process keeps in Python: of requests in a front end, of the rollout in an engine core."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable

from kvplugin.metrics.definitions import ARM, OTHER
from kvplugin.metrics.directory import metrics_directory
from kvplugin.metrics.export import warn_unusable
from kvplugin.metrics.files import MetricFile, unique_mark
from kvplugin.metrics.metric import Metric, MetricType
from kvplugin.metrics.series import combinations, series_keys

_FILE_TYPES = {
    MetricType.COUNTER: "counter",
    MetricType.HISTOGRAM: "histogram",
    # Of several processes, and of one that was restarted, the one that spoke last is right.
    MetricType.GAUGE: "gauge_mostrecent",
}
NO_ARM = ""

Labels = tuple[str, ...]


class HostMetrics:
    """The given metrics, in this process. Thread-safe; nothing here raises, and nothing waits.

    Series without an arm exist from the start, those of an arm from :meth:`expect_arms` or their first value on. Where
    the metrics directory cannot be written, one warning is logged and nothing is kept.

    Args:
        metrics: what may be set; the values of all their labels but the arm are listed in their definitions.
        exports: whether anything is kept at all.
    """

    def __init__(self, metrics: Iterable[Metric], *, exports: bool = True) -> None:
        self._metrics = tuple(metrics)
        self._lock = threading.Lock()
        self._values: dict[str, float] = {}
        self._places: dict[str, MetricFile] = {}
        self._keys: dict[tuple[str, Labels], tuple[str, ...]] = {}
        self._arms: set[str] = set()
        self._exports = exports
        self.expect_arms([NO_ARM])

    def expect_arms(self, arms: Iterable[str]) -> None:
        """Give these arms their series, at 0."""
        with self._lock:
            for arm in arms:
                self._expect(arm)

    def inc(self, metric: Metric, labels: Labels, by: float = 1) -> None:
        """Add to a counter."""
        with self._lock:
            for key in self._series(metric, labels):
                self._add(key, by)

    def set(self, metric: Metric, labels: Labels, value: float) -> None:
        """Set a gauge."""
        with self._lock:
            for key in self._series(metric, labels):
                self._store(key, value, time.time())

    def observe(self, metric: Metric, labels: Labels, value: float, times: int = 1) -> None:
        """Add a value to a histogram, once or several times."""
        with self._lock:
            if keys := self._series(metric, labels):
                self._add(keys[bisect_left(metric.buckets, value)], times)
                self._add(keys[-1], value * times)

    def _series(self, metric: Metric, labels: Labels) -> tuple[str, ...]:
        """Keys of a counter or gauge, or of a histogram's buckets and sum; none where nothing is kept."""
        found = self._keys.get((metric.name, labels))
        if found is None:
            known = self._known(metric, labels)
            self._expect(labels[metric.labels.index(ARM)] if ARM in metric.labels else NO_ARM)
            found = self._keys.get((metric.name, known), ())
        return found

    @staticmethod
    def _known(metric: Metric, labels: Labels) -> Labels:
        """The labels, with :data:`OTHER` for values that are not listed."""
        return tuple(
            value if label is ARM or any(value == known.text for known in label.values) else OTHER
            for label, value in zip(metric.labels, labels, strict=True)
        )

    def _expect(self, arm: str) -> None:
        if arm in self._arms or not self._exports:
            return
        self._arms.add(arm)
        series: dict[MetricType, dict[str, float]] = defaultdict(dict)
        for metric in self._metrics:
            if (ARM in metric.labels) != (arm == NO_ARM):
                for labels in combinations(metric, arm):
                    names = tuple(value.text for value in labels)
                    keys = series_keys(metric, names)
                    self._keys[metric.name, names] = keys
                    series[metric.type].update(dict.fromkeys(keys, 0.0))
        directory = metrics_directory()
        try:
            for kind, values in series.items():
                file = MetricFile(directory / f"{_FILE_TYPES[kind]}_{unique_mark()}.db", values)
                self._places.update(dict.fromkeys(values, file))
                self._values.update(values)
        except OSError as error:
            warn_unusable(directory, str(error))
            self._exports = False

    def _add(self, key: str, by: float) -> None:
        self._store(key, self._values.get(key, 0.0) + by)

    def _store(self, key: str, value: float, when: float = 0.0) -> None:
        place = self._places.get(key)
        if place is not None:
            self._values[key] = value
            place.set(key, value, when)
