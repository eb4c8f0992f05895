"""Serving the metric files from a registry, for the server whose ``/metrics`` does not read a directory by itself."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from prometheus_client import REGISTRY, CollectorRegistry
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.registry import Collector

from kvplugin.metrics.definitions import ACTIVE_STATE, METRICS, InactiveReason
from kvplugin.metrics.directory import metrics_directory, read_by_prometheus_client
from kvplugin.metrics.files import FILE_MARK

logger = logging.getLogger(__name__)


class DirectoryCollector(Collector):
    """The metrics found in a directory at each scrape, and ``not_reported`` until a worker says how it went."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def describe(self) -> Iterable[Family]:
        """Name, help and type of every metric, so that a registry notices a second collector."""
        return [Family(metric.family, metric.help, metric.type) for metric in METRICS]

    def collect(self) -> Iterable[Family]:
        """Values summed over processes; nothing where the files cannot be read, to spare the server's own metrics."""
        try:
            files = [str(path) for path in self._directory.glob(f"*_{FILE_MARK}*.db")]
            families: list[Family] = list(MultiProcessCollector.merge(files))  # type: ignore[no-untyped-call]
        except Exception as error:
            _warn_unreadable(self._directory, str(error))
            return []
        if all(family.name != ACTIVE_STATE.family for family in families):
            families.append(_not_reported())
        return families


def register_collector(registry: CollectorRegistry = REGISTRY) -> bool:
    """Serve this server's metric files from ``registry``, unless they are served already.

    Returns:
        True if a collector was added; False where ``PROMETHEUS_MULTIPROC_DIR`` makes the server read the files by
        itself, or where the registry has a collector for them.
    """
    if read_by_prometheus_client():
        return False
    try:
        registry.register(DirectoryCollector(metrics_directory()))
    except ValueError:
        # Duplicated time series. The names are ours alone, so this is an earlier call in the same process.
        return False
    return True


def _not_reported() -> Family:
    family = Family(ACTIVE_STATE.family, ACTIVE_STATE.help, ACTIVE_STATE.type)
    family.add_sample(ACTIVE_STATE.name, {ACTIVE_STATE.labels[0].name: InactiveReason.NOT_REPORTED}, 0.0)
    return family


@cache
def _warn_unreadable(directory: Path, problem: str) -> None:
    logger.warning("kvplugin metrics: %s cannot be read (%s); /metrics lacks kvplugin's", directory, problem)
