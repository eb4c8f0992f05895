"""The stat logger in vLLM's own hands: its plugin loader, its manager's adapter and its ``/metrics`` route."""

from __future__ import annotations

import importlib.util

import pytest
from scrapes import parse, run_python, value

pytestmark = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")

SERVER = """
from fastapi import FastAPI
from fastapi.testclient import TestClient

from kvplugin.metrics.export import CounterExporter
from kvplugin.topology.counters import Counter, new_counters
from kvplugin.vllm import stat_logger
from vllm.entrypoints.serve.instrumentator.metrics import attach_router
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter, load_stat_logger_plugin_factories

def serve():
    (factory,) = [found for found in load_stat_logger_plugin_factories() if found is stat_logger.KvpluginStatLogger]
    manager = PerEngineStatLoggerAdapter(None, engine_indexes=[0, 1], per_engine_stat_logger_factory=factory)
    manager.log_engine_initialized()
    manager.record(None, None, mm_cache_stats=None, engine_idx=1)
    manager.log()

def fail():
    raise RuntimeError("no metrics today")

counters = new_counters()
counters[1, Counter.SEEN] = 4711
CounterExporter(counters)
serve()
serve()
app = FastAPI()
attach_router(app)
print(TestClient(app).get("/metrics").text)

# A failure of ours ends this process, and thereby the test, if it reaches vLLM.
stat_logger.register_collector = stat_logger.report_if_silent = fail
serve()
"""


def test_served_once_by_vllms_own_route_and_never_fatal(layout: dict[str, str]) -> None:
    found = parse(run_python("-c", SERVER, environment=layout))
    assert value(found, "kvplugin_policy_rows_total", arm="default", phase="decode", outcome="seen") == 4711
    assert value(found, "kvplugin_active", reason="not_reported") == 0
