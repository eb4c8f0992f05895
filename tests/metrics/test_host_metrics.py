from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from scrapes import scrape, value

from kvplugin.metrics.definitions import (
    FRONT_END_METRICS,
    REQUEST_ERRORS,
    REQUEST_FINISHED,
    REQUEST_TTFT,
    REQUESTS,
    ROLLOUT_ENABLED,
    ROLLOUT_METRICS,
    ROLLOUT_SHARE,
    ArmChoice,
)
from kvplugin.metrics.directory import DIRECTORY_VARIABLE
from kvplugin.metrics.host import HostMetrics

TTFT = "kvplugin_request_ttft_seconds"


def test_arms_have_all_their_series_at_zero(registry: CollectorRegistry) -> None:
    HostMetrics(FRONT_END_METRICS).expect_arms(["a", "b"])
    found = scrape(registry)
    for arm in ("a", "b"):
        assert value(found, "kvplugin_requests_total", arm=arm, choice="session") == 0
        assert value(found, "kvplugin_request_finished_total", arm=arm, reason="stop") == 0
        assert value(found, f"{TTFT}_bucket", arm=arm, le="0.25") == 0
        assert value(found, f"{TTFT}_count", arm=arm) == 0
    assert value(found, "kvplugin_request_errors_total", key="kvplugin_arm") == 0


def test_histograms_are_cumulative_and_exact(registry: CollectorRegistry) -> None:
    metrics = HostMetrics(FRONT_END_METRICS)
    for seconds, times in ((0.001, 1), (0.0011, 1), (0.25, 2), (1e9, 3)):
        metrics.observe(REQUEST_TTFT, ("a",), seconds, times)
    text = generate_latest(registry).decode()
    (family,) = [f for f in text_string_to_metric_families(text) if f.name == TTFT]
    assert family.type == "histogram"
    buckets = {s.labels["le"]: s.value for s in family.samples if s.name.endswith("_bucket")}
    assert (buckets["0.001"], buckets["0.005"], buckets["0.1"], buckets["0.25"]) == (1, 2, 2, 4)
    assert (buckets["160.0"], buckets["+Inf"]) == (4, 7)
    assert value(scrape(registry), f"{TTFT}_count", arm="a") == 7
    assert value(scrape(registry), f"{TTFT}_sum", arm="a") == pytest.approx(0.001 + 0.0011 + 0.5 + 3e9)


def test_unlisted_values_count_as_others(registry: CollectorRegistry) -> None:
    metrics = HostMetrics(FRONT_END_METRICS)
    metrics.inc(REQUEST_FINISHED, ("a", "meteor"))
    metrics.inc(REQUEST_ERRORS, ("kvplugin_typo",))
    found = scrape(registry)
    assert value(found, "kvplugin_request_finished_total", arm="a", reason="other") == 1
    assert value(found, "kvplugin_request_errors_total", key="other") == 1


def test_gauges_show_what_was_said_last(registry: CollectorRegistry) -> None:
    first, second = HostMetrics(ROLLOUT_METRICS), HostMetrics(ROLLOUT_METRICS)
    first.set(ROLLOUT_ENABLED, (), 1)
    second.set(ROLLOUT_ENABLED, (), 0)
    second.set(ROLLOUT_SHARE, ("a",), 0.25)
    assert value(scrape(registry), "kvplugin_rollout_enabled") == 0
    assert value(scrape(registry), "kvplugin_rollout_share", arm="a") == 0.25
    first.set(ROLLOUT_ENABLED, (), 1)
    assert value(scrape(registry), "kvplugin_rollout_enabled") == 1


def test_processes_add_up(registry: CollectorRegistry, layout: dict[str, str]) -> None:
    code = (
        "from kvplugin.metrics.host import HostMetrics\n"
        "from kvplugin.metrics.definitions import *\n"
        "m = HostMetrics(FRONT_END_METRICS)\n"
        "m.inc(REQUESTS, ('a', ArmChoice.REQUEST), 3); m.observe(REQUEST_TTFT, ('a',), 0.5)\n"
    )
    for _ in range(2):
        subprocess.run([sys.executable, "-c", code], check=True)
    HostMetrics(FRONT_END_METRICS).inc(REQUESTS, ("a", ArmChoice.REQUEST))
    assert value(scrape(registry), "kvplugin_requests_total", arm="a", choice="request") == 7
    assert value(scrape(registry), f"{TTFT}_count", arm="a") == 2


def test_a_directory_that_cannot_be_written_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "file" / "below"))
    with caplog.at_level(logging.WARNING):
        metrics = HostMetrics(FRONT_END_METRICS)
        metrics.inc(REQUESTS, ("a", ArmChoice.REQUEST))
        metrics.observe(REQUEST_TTFT, ("a",), 1.0)
    assert len(caplog.records) == 1
    assert "cannot be written" in caplog.text


def test_nothing_is_written_without_export(layout: dict[str, str]) -> None:
    metrics = HostMetrics(FRONT_END_METRICS, exports=False)
    metrics.expect_arms(["a"])
    metrics.inc(REQUESTS, ("a", ArmChoice.REQUEST))
    assert list(Path(next(iter(layout.values()))).glob("*")) == []
