"""Reading a counter buffer while the engine goes on adding to it."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from kvplugin.metrics.series import Snapshot


class Reader(Protocol):
    """Reads one counter buffer, int64 ``[..., arms, rows, columns]``; dimensions before the arms are added up."""

    def read(self, *, wait: bool = False) -> list[Snapshot] | None:
        """Each arm's part as it is now, or None while a copy is under way and ``wait`` is False."""


class HostReader:
    """Reads a buffer in host memory."""

    def __init__(self, counters: Tensor, arms: int) -> None:
        self._counters, self._arms = counters, arms

    def read(self, *, wait: bool = False) -> list[Snapshot] | None:
        """The buffer as it is now. Each cell is one aligned 8-byte load, so that none is half old and half new."""
        return _added_up(self._counters, self._arms)


class DeviceReader:
    """Reads a CUDA buffer by copies on a stream of its own, which the engine's streams never wait for.

    Not run: there was no GPU to run it on. While any thread captures a CUDA graph, CUDA forbids the event query that
    this needs and fails the capture, so the first read must come after the engine's captures.
    """

    def __init__(self, counters: Tensor, arms: int) -> None:
        self._counters, self._arms = counters, arms
        self._host = torch.zeros(counters.shape, dtype=counters.dtype, pin_memory=True)
        self._stream = torch.cuda.Stream(counters.device)  # type: ignore[no-untyped-call]
        self._landed = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._copying = False

    def read(self, *, wait: bool = False) -> list[Snapshot] | None:
        """The buffer as it was when the last copy ran; starts a copy and returns None where none has landed yet."""
        if wait or not self._copying:
            self._start_copy()
        if wait:
            self._landed.synchronize()
        elif not self._landed.query():  # type: ignore[no-untyped-call]
            return None
        self._copying = False
        return _added_up(self._host, self._arms)

    def _start_copy(self) -> None:
        with torch.cuda.stream(self._stream):
            self._host.copy_(self._counters, non_blocking=True)
            self._landed.record(self._stream)
        self._copying = True


def reader_for(counters: Tensor, arms: int = 1) -> Reader:
    """The reader that suits the buffer's device."""
    return DeviceReader(counters, arms) if counters.is_cuda else HostReader(counters, arms)


def _added_up(counters: Tensor, arms: int) -> list[Snapshot]:
    """``[..., arms, rows, columns]``, or ``[rows, columns]`` for one arm, as ``[arms][rows][columns]``."""
    cells: list[Snapshot] = counters.reshape(-1, arms, *counters.shape[-2:]).sum(0).tolist()
    return cells


def zeros(rows: int, columns: int) -> Snapshot:
    """The snapshot of a buffer in which nothing is counted yet."""
    return [[0] * columns] * rows


def grown(total: Snapshot, known: Snapshot, found: Snapshot) -> Snapshot:
    """A total, and what has been added since it was last known; counters only grow, a smaller value is a stale one."""
    return [
        [sum_ + max(0, new - old) for sum_, old, new in zip(*rows, strict=True)]
        for rows in zip(total, known, found, strict=True)
    ]


def latest(known: Snapshot, found: Snapshot) -> Snapshot:
    """The larger value of each cell."""
    return [[max(pair) for pair in zip(*rows, strict=True)] for rows in zip(known, found, strict=True)]
