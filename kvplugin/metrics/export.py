"""The exporter: from counter buffers in a worker to the files that ``/metrics`` is served from."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import chain
from multiprocessing.util import Finalize
from pathlib import Path

import torch
from torch import Tensor

from kvplugin.errors import ArgumentError
from kvplugin.metrics.definitions import DEFAULT_ARM
from kvplugin.metrics.directory import metrics_directory
from kvplugin.metrics.files import MetricFile, unique_mark
from kvplugin.metrics.metric import Buffer, MetricType
from kvplugin.metrics.series import Snapshot, counter_series
from kvplugin.metrics.snapshot import grown, latest, reader_for, zeros

logger = logging.getLogger(__name__)

DRAIN_INTERVAL_S = 0.25


class CounterExporter:
    """Publishes counter buffers, as they grow.

    All series exist as soon as this returns. They keep their values when the process ends, so that a restarted worker
    adds to them. The buffers must only ever grow; a smaller value is not published. Where the metrics directory cannot
    be written, one warning is logged and nothing is exported. CUDA buffers: to be made once the engine has captured its
    graphs (:class:`DeviceReader` says why).

    Args:
        counters: int64 ``[..., rows, columns]`` for each kind of buffer that the engine has, with arms ``[..., arms,
            rows, columns]`` for those that count by arm; dimensions before that are added up.
        arms: name of each arm, None for one that is free; nothing = an engine without arms.
        interval_s: seconds between two publications after :meth:`start`.
        on_change: called with the host's copy of a buffer, by arm, whenever it has grown, also where nothing can be
            exported; must not raise.

    Raises:
        ArgumentError: a wrong shape or dtype, or an interval that is not positive.
    """

    def __init__(
        self,
        counters: Mapping[Buffer, Tensor],
        *,
        arms: Sequence[str | None] | None = None,
        interval_s: float = DRAIN_INTERVAL_S,
        on_change: Callable[[Buffer, Sequence[Snapshot]], None] = lambda buffer, snapshots: None,
    ) -> None:
        _check_arguments(counters, 0 if arms is None else len(arms), interval_s)
        self._arms: tuple[str | None, ...] = (DEFAULT_ARM,) if arms is None else tuple(arms)
        self._readers = {buffer: reader_for(tensor, self._arms_in(buffer)) for buffer, tensor in counters.items()}
        self._known: dict[Buffer, list[Snapshot]] = {
            buffer: [_zeros(buffer)] * self._arms_in(buffer) for buffer in counters
        }
        self._interval_s = interval_s
        self._on_change = on_change
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._parts: dict[str, _Part] | None = {}
        self._closed = False
        self._add_parts()
        self.publish()
        # multiprocessing's exit hook, because its children end without running atexit where they were forked.
        self._at_exit = Finalize(None, self.close, exitpriority=10)

    @property
    def exports(self) -> bool:
        """True from construction to :meth:`close`, unless the directory could not be written."""
        return self._parts is not None and not self._closed

    def start(self) -> None:
        """Publish every ``interval_s`` seconds from a daemon thread, until :meth:`close`."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._drain, name="kvplugin-metrics", daemon=True)
            self._thread.start()

    def publish(self) -> None:
        """Publish what the buffers hold now; for a CUDA buffer, what they held when the last copy ran. Thread-safe."""
        self._publish(wait=False)

    def rename_arms(self, arms: Sequence[str | None]) -> None:
        """What is counted from now on belongs to these arms; what has been counted stays with the ones before.

        To be called where no step is under way; it waits for the device.
        """
        self._publish(wait=True)
        with self._lock:
            self._arms = tuple(arms)
            self._add_parts()

    def close(self) -> None:
        """Publish once more and stop. Called at exit if not before; may be called twice."""
        if self._forked():
            return
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._publish(wait=True)
        with self._lock:
            for part in (self._parts or {}).values():
                part.close()
            self._closed = True
        self._at_exit.cancel()

    def _arms_in(self, buffer: Buffer) -> int:
        return len(self._arms) if buffer.per_arm else 1

    def _publish(self, *, wait: bool) -> None:
        if self._forked():
            return
        with self._lock:
            if self._closed:
                return
            for buffer, reader in self._readers.items():
                found = reader.read(wait=wait)
                if found is not None and found != self._known[buffer]:
                    self._store(buffer, found)

    def _forked(self) -> bool:
        """True in a child of the exporting process: it shares the files, but its buffers and lock are copies."""
        return os.getpid() != self._process

    def _store(self, buffer: Buffer, found: list[Snapshot]) -> None:
        known = self._known[buffer]
        names = self._arms if buffer.per_arm else (DEFAULT_ARM,)
        for name, old, new in zip(names, known, found, strict=True):
            if name is not None and new != old and self._parts is not None:
                self._parts[name if buffer.per_arm else ENGINE].add(buffer, old, new)
        self._known[buffer] = [latest(*pair) for pair in zip(known, found, strict=True)]
        self._on_change(buffer, self._known[buffer])

    def _drain(self) -> None:
        while not self._stop.wait(self._interval_s):
            try:
                self.publish()
            except Exception:
                logger.exception("kvplugin metrics: reading the counters failed; they stay at their last values")
                return

    def _add_parts(self) -> None:
        """A file for each arm that has none yet, and one for what is counted without arms."""
        if self._parts is None or self._closed:
            return
        wanted: dict[str, list[Buffer]] = {ENGINE: [buffer for buffer in self._readers if not buffer.per_arm]}
        wanted |= {name: [b for b in self._readers if b.per_arm] for name in self._arms if name is not None}
        try:
            for name, buffers in wanted.items():
                if buffers and name not in self._parts:
                    self._parts[name] = _Part(buffers, name)
        except OSError as error:
            warn_unusable(metrics_directory(), str(error))
            self._parts = None


ENGINE = ""
"""Name of the part that is counted without arms; no arm is called so."""


class _Part:
    """The series of one arm, in files of their own, one for each type; several files of a directory are added up."""

    def __init__(self, buffers: Sequence[Buffer], arm: str) -> None:
        self._totals = {buffer: _zeros(buffer) for buffer in buffers}
        self._series = {buffer: counter_series([buffer], arm) for buffer in buffers}
        first: dict[MetricType, dict[str, float]] = {}
        for series in chain(*self._series.values()):
            first.setdefault(series.metric.type, {})[series.key] = 0.0
        directory = metrics_directory()
        self._files = {
            kind: MetricFile(directory / f"{kind}_{unique_mark()}.db", values) for kind, values in first.items()
        }

    def add(self, buffer: Buffer, old: Snapshot, new: Snapshot) -> None:
        """What a buffer counted of the arm since it held ``old``."""
        self._totals[buffer] = grown(self._totals[buffer], old, new)
        for series in self._series[buffer]:
            self._files[series.metric.type].set(series.key, series.total(self._totals[buffer]))

    def close(self) -> None:
        """Close the files; what they hold stays."""
        for file in self._files.values():
            file.close()


def _zeros(buffer: Buffer) -> Snapshot:
    return zeros(*buffer.shape)


@cache
def warn_unusable(directory: Path, problem: str) -> None:
    """Log, once per process, that metrics cannot be written."""
    logger.warning("kvplugin metrics: %s cannot be written (%s); serving goes on without them", directory, problem)


def _check_arguments(counters: Mapping[Buffer, Tensor], arms: int, interval_s: float) -> None:
    where = "CounterExporter"
    for buffer, tensor in counters.items():
        by_arm = buffer.per_arm and arms > 0
        sizes = (*((arms,) if by_arm else ()), *buffer.shape)
        if tensor.dtype != torch.int64 or tensor.shape[-len(sizes) :] != sizes:
            found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            wanted = f"int64 [..., {', '.join(map(str, sizes))}]"
            raise ArgumentError(f"{where}.counters[{buffer.name}]", f"got {found}", f"must be {wanted}")
    if not interval_s > 0:
        raise ArgumentError(f"{where}.interval_s", f"{interval_s} is not positive", "give seconds")
