"""The worker's counts on vLLM's own ``/metrics`` route."""

from __future__ import annotations

import importlib.util

import pytest
from scrapes import parse, run_python, value

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")

SERVER = """
from fastapi import FastAPI
from fastapi.testclient import TestClient
from vllm.entrypoints.serve.instrumentator.metrics import attach_router

from kvplugin.metrics.collector import register_collector
from kvplugin.metrics.definitions import EXACT, REMAP_PATHS
from kvplugin.metrics.export import CounterExporter
from kvplugin.metrics.status import report_active
from kvplugin.remap.paths import RemapPath, new_path_counters
from kvplugin.topology.counters import Counter, new_counters

counters, paths = new_counters(), new_path_counters()
paths[RemapPath.MEMO] = 42
counters[1, Counter.SEEN] = 4711
CounterExporter({EXACT: counters, REMAP_PATHS: paths[None]})
report_active("active")
register_collector()
register_collector()
app = FastAPI()
attach_router(app)
print(TestClient(app).get("/metrics").text)
"""


def test_served_once(layout: dict[str, str]) -> None:
    found = parse(run_python("-c", SERVER, environment=layout))
    assert value(found, "kvplugin_policy_rows_total", arm="default", phase="decode", outcome="seen") == 4711
    assert value(found, "kvplugin_remap_conversions_total", path="memo") == 42
    assert value(found, "kvplugin_active", reason="active") == 1
