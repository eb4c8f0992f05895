"""Whether the policy's hook is in place, and what is installed: two gauges, written by whoever knows."""

from __future__ import annotations

import sys

import kvplugin
from kvplugin.metrics.definitions import ACTIVE, ACTIVE_STATE, BUILD_INFO, ActiveState
from kvplugin.metrics.directory import metrics_directory
from kvplugin.metrics.export import warn_unusable
from kvplugin.metrics.files import MetricFile, process_mark
from kvplugin.metrics.series import series_keys

# Of several processes that report the same, one series remains, and without a process id.
_PREFIX = "gauge_max_"


def report_active(state: ActiveState) -> None:
    """Say whether the hook is in place: ``ACTIVE``, or the reason why not. The last report of a process holds.

    One process of each engine reports, before the engine is up. Several that disagree appear as several series. Where
    the metrics directory cannot be written, one warning is logged.
    """
    versions = (kvplugin.__version__, _version_in_use("vllm"), _version_in_use("torch"))
    values = {
        series_keys(ACTIVE_STATE, (state,))[0]: float(state == ACTIVE),
        series_keys(BUILD_INFO, versions)[0]: 1.0,
    }
    try:
        MetricFile(metrics_directory() / f"{_PREFIX}{process_mark()}.db", values).close()
    except OSError as error:
        warn_unusable(metrics_directory(), str(error))


def _version_in_use(module: str) -> str:
    """Version of a module if this process has it; looked up, not imported."""
    return str(getattr(sys.modules.get(module), "__version__", "none"))
