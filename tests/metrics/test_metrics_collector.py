from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from scrapes import scrape, value

from kvplugin.metrics.collector import register_collector
from kvplugin.metrics.definitions import EXACT
from kvplugin.metrics.directory import DIRECTORY_VARIABLE, PROMETHEUS_VARIABLE
from kvplugin.metrics.export import CounterExporter
from kvplugin.topology.counters import Counter, new_counters

SEEN = {"arm": "default", "phase": "prefill", "outcome": "seen"}


NOTHING_REPORTED = {("kvplugin_active", frozenset({("reason", "not_reported")})): 0.0}


def export_once(seen: int) -> None:
    counters = new_counters()
    counters[0, Counter.SEEN] = seen
    CounterExporter({EXACT: counters}).close()


def test_registering_twice_serves_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    registry = CollectorRegistry()
    assert register_collector(registry)
    assert not register_collector(registry)
    export_once(11)
    assert value(scrape(registry), "kvplugin_policy_rows_total", **SEEN) == 11


def test_not_registered_where_the_server_reads_the_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(PROMETHEUS_VARIABLE, str(tmp_path))
    registry = CollectorRegistry()
    assert not register_collector(registry)
    export_once(11)
    assert scrape(registry) == {}


def test_no_directory_yet_is_no_series_yet(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "later"))
    registry = CollectorRegistry()
    register_collector(registry)
    assert scrape(registry) == NOTHING_REPORTED
    export_once(11)
    assert value(scrape(registry), "kvplugin_policy_rows_total", **SEEN) == 11


def test_a_broken_file_costs_only_our_metrics(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "counter_kvplugin-1.db").write_bytes(b"\xff")
    registry = CollectorRegistry()
    register_collector(registry)
    assert scrape(registry) == {}
    assert scrape(registry) == {}
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        f"kvplugin metrics: {tmp_path} cannot be read"
    ]


def test_other_programs_files_are_not_served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    (tmp_path / "counter_4711.db").write_bytes(b"not for us")
    registry = CollectorRegistry()
    register_collector(registry)
    export_once(11)
    assert value(scrape(registry), "kvplugin_policy_rows_total", **SEEN) == 11
