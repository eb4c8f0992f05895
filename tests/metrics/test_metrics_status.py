from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from prometheus_client import CollectorRegistry
from scrapes import run_python, scrape

import kvplugin
from kvplugin.metrics.collector import register_collector
from kvplugin.metrics.definitions import ACTIVE, ActiveState, InactiveReason
from kvplugin.metrics.directory import DIRECTORY_VARIABLE
from kvplugin.metrics.status import report_active


def active(registry: CollectorRegistry) -> dict[str, float]:
    """Value of ``kvplugin_active`` by reason; any label but ``reason`` is an error."""
    found = {labels: value for (name, labels), value in scrape(registry).items() if name == "kvplugin_active"}
    return {dict(labels).pop("reason"): value for labels, value in found.items() if len(labels) == 1}


@pytest.mark.parametrize("state", [ACTIVE, *InactiveReason])
def test_one_series_for_the_state_that_holds(registry: CollectorRegistry, state: ActiveState) -> None:
    report_active(state)
    assert active(registry) == {state: float(state == ACTIVE)}


def test_the_last_report_of_a_process_holds(registry: CollectorRegistry) -> None:
    report_active(InactiveReason.SELF_TEST_FAILED)
    report_active(ACTIVE)
    assert active(registry) == {"active": 1.0}


def test_processes_that_agree_are_one_series(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    served = CollectorRegistry()
    register_collector(served)
    other = "from kvplugin.metrics.status import report_active; report_active('active')"
    run_python("-c", other, environment={DIRECTORY_VARIABLE: str(tmp_path)})
    report_active(ACTIVE)
    assert len(list(tmp_path.glob("gauge_*.db"))) == 2
    assert active(served) == {"active": 1.0}


def test_silence_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    served = CollectorRegistry()
    register_collector(served)
    assert active(served) == {"not_reported": 0.0}
    report_active(InactiveReason.NO_SPARSE_ATTENTION)
    assert active(served) == {"no_sparse_attention": 0.0}


def test_build_info_names_what_this_process_uses(registry: CollectorRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "vllm", raising=False)
    report_active(ACTIVE)
    versions = {"version": kvplugin.__version__, "vllm_version": "none", "torch_version": torch.__version__}
    assert scrape(registry)["kvplugin_build_info", frozenset(versions.items())] == 1.0


def test_unwritable_directory_is_logged_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path / "file" / "metrics"))
    report_active(ACTIVE)
    report_active(ACTIVE)
    assert len(caplog.records) == 1
