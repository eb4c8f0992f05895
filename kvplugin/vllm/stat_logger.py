"""The stat-logger plugin: the one point that vLLM runs in every server process once the engine is up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from kvplugin.metrics.collector import register_collector
from kvplugin.metrics.status import report_if_silent
from kvplugin.vllm.log import logger


class KvpluginStatLogger(StatLoggerBase):
    """Makes ``/metrics`` serve the policy's counters. vLLM's own statistics are not looked at.

    vLLM builds one for each engine, and takes an exception from here as a reason not to start: none gets out. That a
    plugin of this kind is installed makes vLLM keep its own statistics too, even with ``--disable-log-stats``.
    """

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        _guarded(register_collector)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing to do at each step: the counters come from the worker."""

    def log_engine_initialized(self) -> None:
        """Say so if no worker has reported by now."""
        _guarded(report_if_silent)


def _guarded(step: Callable[[], object]) -> None:
    try:
        step()
    except OSError as error:
        logger.debug("kvplugin metrics: %s", error)
    except Exception:
        logger.exception("kvplugin metrics: /metrics stays without kvplugin's")
