from __future__ import annotations

import re
from collections import Counter as Tally
from itertools import product
from pathlib import Path

import pytest

from kvplugin.metrics.definitions import (
    ACTIVE,
    ACTIVE_STATE,
    ARM,
    BUILD_INFO,
    DEFAULT_ARM,
    EXACT,
    METRICS,
    PREFIX,
    REMAP_INVALID,
    REMAP_PATHS,
    SAMPLED,
    SIGNALS,
    InactiveReason,
)
from kvplugin.metrics.metric import Buffer, Metric, MetricType
from kvplugin.metrics.page import render_page
from kvplugin.metrics.series import counter_series
from kvplugin.topology.counters import BYPASS_REASONS, PHASE_ROWS, Counter

BUFFERS = (EXACT, SAMPLED, PREFIX, SIGNALS, REMAP_PATHS, REMAP_INVALID)
SERIES = counter_series(BUFFERS, DEFAULT_ARM)
PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_page_is_up_to_date() -> None:
    assert PAGE.read_text() == render_page(), "run: python -m kvplugin.metrics.definitions > docs/metrics.md"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_follow_the_rules_of_prometheus(metric: Metric) -> None:
    assert re.fullmatch(r"kvplugin(_[a-z][a-z0-9]*)+", metric.name)
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    assert metric.help.endswith(".")
    names = [label.name for label in metric.labels]
    assert len(set(names)) == len(names)
    # Labels that Prometheus, its histograms or the multiprocess collector add themselves.
    assert not {"job", "instance", "le", "quantile", "pid"} & set(names)


def test_metric_names_are_unique() -> None:
    assert len({metric.name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize("metric", [m for m in METRICS if m is not BUILD_INFO], ids=lambda metric: metric.name)
def test_label_values_are_bounded_and_explained(metric: Metric) -> None:
    for label in metric.labels:
        if label is ARM:  # names that the operator chose
            assert not label.values
            assert label.meaning
            continue
        texts = [value.text for value in label.values]
        assert texts
        assert len(set(texts)) == len(texts)
        assert all(re.fullmatch(r"[a-z]+(_[a-z]+)*", text) for text in texts)
        assert all(value.meaning for value in label.values)


def test_every_state_has_a_series() -> None:
    assert [value.text for value in ACTIVE_STATE.labels[0].values] == [ACTIVE, *InactiveReason]


def test_every_buffer_of_a_metric_is_listed_here() -> None:
    assert {metric.buffer for metric in METRICS} - {None} == set(BUFFERS)


@pytest.mark.parametrize("buffer", BUFFERS, ids=lambda buffer: buffer.name)
def test_every_cell_is_exported_once(buffer: Buffer) -> None:
    """Except that bypassed rows also appear in all, whatever their reason, among the outcomes of a row."""
    parts = [series for series in SERIES if series.metric.buffer is buffer and "bypassed" not in series.labels]
    found = Tally(cell for series in parts for cell in series.cells)
    bypassed = {(row, column) for row in range(len(PHASE_ROWS)) for column in BYPASS_REASONS.values()}
    cells = set(product(range(buffer.rows), buffer.columns))
    # The reasons of sampled rows are not exported: they are those of all rows.
    assert set(found) == (cells - bypassed if buffer is SAMPLED else cells)
    assert set(found.values()) == {1}


@pytest.mark.parametrize("buffer", [EXACT, SAMPLED], ids=lambda buffer: buffer.name)
@pytest.mark.parametrize(("row", "phase"), enumerate(PHASE_ROWS))
def test_bypassed_is_the_sum_over_reasons(buffer: Buffer, row: int, phase: str) -> None:
    labels = (DEFAULT_ARM, phase, "bypassed")
    (series,) = [s for s in SERIES if s.metric.buffer is buffer and s.labels == labels]
    assert set(series.cells) == {(row, column) for column in BYPASS_REASONS.values()}


def test_series_have_the_labels_their_cells_stand_for() -> None:
    snapshot = [[100 * row + column for column in Counter] for row in range(len(PHASE_ROWS))]
    totals = {
        (series.metric.name, series.labels): series.total(snapshot)
        for series in SERIES
        if series.metric.buffer in (EXACT, SAMPLED)
    }
    assert totals["kvplugin_policy_rows_total", ("default", "prefill", "seen")] == Counter.SEEN
    assert totals["kvplugin_policy_rows_total", ("default", "decode", "identity")] == 100 + Counter.IDENTITY
    assert totals["kvplugin_policy_tokens_total", ("default", "decode", "kept")] == 100 + Counter.KEPT
    assert totals["kvplugin_policy_sampled_tokens_total", ("default", "prefill", "sink_hit")] == Counter.SINK_HIT
    assert totals["kvplugin_policy_bypass_total", ("no_scores",)] == 100 + 2 * Counter.BYPASS_NO_SCORES


def test_series_are_unique() -> None:
    assert len({series.key for series in SERIES}) == len(SERIES)
