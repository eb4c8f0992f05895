"""Signals of the indexer's health, from sampled rows."""

from kvplugin.topology.signals.counters import (
    BOUNDS,
    UNIT,
    Signal,
    SignalColumn,
    columns_of,
    new_signal_counters,
)
from kvplugin.topology.signals.memory import SignalMemory
from kvplugin.topology.signals.op import observe_signals

__all__ = [
    "BOUNDS",
    "UNIT",
    "Signal",
    "SignalColumn",
    "SignalMemory",
    "columns_of",
    "new_signal_counters",
    "observe_signals",
]
