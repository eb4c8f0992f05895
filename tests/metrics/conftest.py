from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from kvplugin.metrics import collector, export
from kvplugin.metrics.directory import DIRECTORY_VARIABLE, PROMETHEUS_VARIABLE


@pytest.fixture(autouse=True)
def fresh_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PROMETHEUS_VARIABLE, raising=False)
    monkeypatch.delenv(DIRECTORY_VARIABLE, raising=False)
    export.warn_unusable.cache_clear()
    collector._warn_unreadable.cache_clear()


@pytest.fixture(params=["one server", "several servers"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """Environment of the processes of a server, set in this one too: with one API server and with several."""
    directory = tmp_path / "metrics"
    if request.param == "several servers":
        directory.mkdir()  # as vLLM does
    variable = DIRECTORY_VARIABLE if request.param == "one server" else PROMETHEUS_VARIABLE
    monkeypatch.setenv(variable, str(directory))
    return {variable: str(directory)}


@pytest.fixture
def registry(layout: dict[str, str]) -> CollectorRegistry:
    """The registry that ``/metrics`` is served from, as vLLM builds it, after kvplugin has been at it."""
    served = CollectorRegistry()
    if PROMETHEUS_VARIABLE in layout:
        MultiProcessCollector(served)
    collector.register_collector(served)
    return served
