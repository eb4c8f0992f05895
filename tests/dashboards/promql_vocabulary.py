"""What PromQL may say about kvplugin's metrics: their names, labels, and the values of those labels."""

from __future__ import annotations

import re
from collections.abc import Iterator

from kvplugin.dashboards.recordings import RECORDINGS
from kvplugin.metrics.definitions import METRICS
from kvplugin.metrics.metric import Metric, MetricType

SELECTOR = re.compile(r"\b(?P<name>kvplugin_\w+)(?:\{(?P<labels>[^}]*)\})?")
RECORDED = re.compile(r"\b\w+:kvplugin_\w+:\w+")
MATCHER = re.compile(r'(?P<label>\w+)\s*(?:=~|!~|!=|=)\s*"(?P<value>[^"]*)"')
GROUPING = re.compile(r"\b(?:by|on) \(([^)]*)\)")
FROM_PROMETHEUS = {"instance", "job", "le"}


def problems(expression: str) -> list[str]:
    """Names, labels and values in an expression that no scrape has."""
    return [*_recorded_problems(expression), *_selector_problems(RECORDED.sub("", expression))]


def _recorded_problems(expression: str) -> Iterator[str]:
    names = {rule.name for rule in RECORDINGS}
    yield from (f"no rule records {name}" for name in RECORDED.findall(expression) if name not in names)


def _selector_problems(expression: str) -> Iterator[str]:
    series = {name: metric for metric in METRICS for name in _series_names(metric)}
    grouped = {label.strip() for group in GROUPING.findall(expression) for label in group.split(",")} - {""}
    yield from (f"no metric has the label {label}" for label in grouped - _all_labels())
    for found in SELECTOR.finditer(expression):
        metric = series.get(found["name"])
        if metric is None:
            yield f"no metric is called {found['name']}"
            continue
        labels = {label.name: {value.text for value in label.values} for label in metric.labels}
        for label, text in MATCHER.findall(found["labels"] or ""):
            if label not in labels and label not in FROM_PROMETHEUS:
                yield f"{metric.name} has no label {label}"
            elif labels.get(label) and "$" not in text:
                yield from (
                    f"{metric.name} never has {label}={value!r}"
                    for value in text.split("|")
                    if value not in labels[label]
                )


def _all_labels() -> set[str]:
    return {label.name for metric in METRICS for label in metric.labels} | FROM_PROMETHEUS


def _series_names(metric: Metric) -> list[str]:
    if metric.type is MetricType.HISTOGRAM:
        return [f"{metric.name}{suffix}" for suffix in ("_bucket", "_sum", "_count")]
    return [metric.name]
