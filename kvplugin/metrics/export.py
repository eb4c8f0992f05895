"""The exporter: from counter buffers in a worker to the files that ``/metrics`` is served from."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping
from functools import cache
from itertools import chain
from multiprocessing.util import Finalize
from pathlib import Path

import torch
from torch import Tensor

from kvplugin.errors import ArgumentError
from kvplugin.metrics.definitions import ARM, DEFAULT_ARM
from kvplugin.metrics.directory import metrics_directory
from kvplugin.metrics.files import MetricFile, unique_mark
from kvplugin.metrics.metric import Buffer, MetricType
from kvplugin.metrics.series import CounterSeries, Snapshot, counter_series
from kvplugin.metrics.snapshot import Reader, latest, reader_for

logger = logging.getLogger(__name__)

DRAIN_INTERVAL_S = 0.25


class CounterExporter:
    """Publishes counter buffers, as they grow, under fixed labels.

    All series exist as soon as this returns. They keep their values when the process ends, so that a restarted worker
    adds to them. The buffers must only ever grow; a smaller value is not published. Where the metrics directory cannot
    be written, one warning is logged and nothing is exported. CUDA buffers: to be made once the engine has captured its
    graphs (:class:`DeviceReader` says why).

    Args:
        counters: int64 ``[..., rows, columns]`` for each kind of buffer that the engine has; leading dimensions are
            added up.
        arm: value of the ``arm`` label.
        interval_s: seconds between two publications after :meth:`start`.
        on_change: called with the host's copy of a buffer whenever it has grown; must not raise.

    Raises:
        ArgumentError: a wrong shape or dtype, an unknown arm, or an interval that is not positive.
    """

    def __init__(
        self,
        counters: Mapping[Buffer, Tensor],
        *,
        arm: str = DEFAULT_ARM,
        interval_s: float = DRAIN_INTERVAL_S,
        on_change: Callable[[Buffer, Snapshot], None] = lambda buffer, snapshot: None,
    ) -> None:
        _check_arguments(counters, arm, interval_s)
        self._readers: dict[Buffer, Reader] = {buffer: reader_for(tensor) for buffer, tensor in counters.items()}
        self._series: dict[Buffer, dict[str, CounterSeries]] = {
            buffer: {series.key: series for series in counter_series([buffer], arm)} for buffer in counters
        }
        self._published: dict[Buffer, Snapshot] = {
            buffer: [[0] * len(buffer.columns)] * buffer.rows for buffer in counters
        }
        self._interval_s = interval_s
        self._on_change = on_change
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._file = self._create_file()
        self.publish()
        # multiprocessing's exit hook, because its children end without running atexit where they were forked.
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    @property
    def exports(self) -> bool:
        """True from construction to :meth:`close`, unless the directory could not be written."""
        return self._file is not None

    def start(self) -> None:
        """Publish every ``interval_s`` seconds from a daemon thread, until :meth:`close`."""
        if self.exports and self._thread is None:
            self._thread = threading.Thread(target=self._drain, name="kvplugin-metrics", daemon=True)
            self._thread.start()

    def publish(self) -> None:
        """Publish what the buffers hold now; for a CUDA buffer, what they held when the last copy ran. Thread-safe."""
        self._publish(wait=False)

    def close(self) -> None:
        """Publish once more and stop. Called at exit if not before; may be called twice."""
        if self._forked():
            return
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._publish(wait=True)
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None
        self._at_exit.cancel()

    def _publish(self, *, wait: bool) -> None:
        if self._forked():
            return
        with self._lock:
            if self._file is None:
                return
            for buffer, reader in self._readers.items():
                found = reader.read(wait=wait)
                if found is not None and found != self._published[buffer]:
                    self._store(self._file, buffer, latest(self._published[buffer], found))

    def _forked(self) -> bool:
        """True in a child of the exporting process: it shares the file, but its buffers and lock are copies."""
        return os.getpid() != self._process

    def _store(self, file: MetricFile, buffer: Buffer, snapshot: Snapshot) -> None:
        for key, series in self._series[buffer].items():
            file.set(key, series.total(snapshot))
        self._published[buffer] = snapshot
        self._on_change(buffer, snapshot)

    def _drain(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.publish()
            except Exception:
                logger.exception("kvplugin metrics: reading the counters failed; they stay at their last values")
                return

    def _create_file(self) -> MetricFile | None:
        directory = metrics_directory()
        zeros = dict.fromkeys(chain(*self._series.values()), 0.0)
        try:
            return MetricFile(directory / f"{MetricType.COUNTER}_{unique_mark()}.db", zeros)
        except OSError as error:
            warn_unusable(directory, str(error))
            return None


@cache
def warn_unusable(directory: Path, problem: str) -> None:
    """Log, once per process, that metrics cannot be written."""
    logger.warning("kvplugin metrics: %s cannot be written (%s); serving goes on without them", directory, problem)


def _check_arguments(counters: Mapping[Buffer, Tensor], arm: str, interval_s: float) -> None:
    where = "CounterExporter"
    for buffer, tensor in counters.items():
        if tensor.dtype != torch.int64 or tensor.shape[-2:] != buffer.shape:
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            wanted = f"int64 [..., {buffer.rows}, {len(buffer.columns)}]"
            raise ArgumentError(f"{where}.counters[{buffer.name}]", f"got {found}", f"must be {wanted}")
    arms = [value.text for value in ARM.values]
    if arm not in arms:
        raise ArgumentError(f"{where}.arm", f"{arm!r} is unknown", f"use {', '.join(arms)}")
    if not interval_s > 0:
        raise ArgumentError(f"{where}.interval_s", f"{interval_s} is not positive", "give seconds")
