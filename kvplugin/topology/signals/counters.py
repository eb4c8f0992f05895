"""Signals of the indexer's health, and the histogram columns that hold them."""

from __future__ import annotations

from enum import IntEnum, unique

import torch
from torch import Tensor

from kvplugin.topology.counters import PHASE_ROWS


@unique
class Signal(IntEnum):
    """A number between 0 and 1 that a sampled row gives."""

    SINK_HIT = 0
    LOCAL_HIT = 1
    WITNESS_HIT = 2
    EVICTED_SHARE = 3
    EVICTION_MARGIN = 4
    STEP_OVERLAP = 5
    LEADER_OVERLAP = 6
    VALID_DEFICIT = 7
    INVALID_SHARE = 8


BOUNDS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Upper bounds of the buckets, each inclusive; one more bucket holds what is larger."""
UNIT = 1_000_000
"""Sums are kept in units of 1 / UNIT."""
COLUMNS_PER_SIGNAL = len(BOUNDS) + 2

SignalColumn = IntEnum(  # type: ignore[misc]
    "SignalColumn",
    {
        f"{signal.name}_{'SUM' if i == COLUMNS_PER_SIGNAL - 1 else f'BUCKET_{i}'}": signal * COLUMNS_PER_SIGNAL + i
        for signal in Signal
        for i in range(COLUMNS_PER_SIGNAL)
    },
)
"""Column of a signal buffer: for each signal its buckets, then its sum."""


def columns_of(signal: Signal) -> tuple[IntEnum, ...]:
    """A signal's buckets, then its sum."""
    first = signal * COLUMNS_PER_SIGNAL
    return tuple(SignalColumn(first + i) for i in range(COLUMNS_PER_SIGNAL))


def new_signal_counters(device: torch.device | str = "cpu", arms: int = 1) -> Tensor:
    """A zeroed buffer: int64 ``[arms, 2, len(SignalColumn)]``, row 0 prefill, row 1 decode."""
    return torch.zeros(arms, len(PHASE_ROWS), len(SignalColumn), dtype=torch.int64, device=device)
