"""The stable-prefix count on the CPU, one pass per row."""

from __future__ import annotations

import numba
import numpy as np

from kvplugin.topology.prefix.call import PrefixCall


def count_into(call: PrefixCall) -> None:
    """Add to ``call.counters``."""
    rows = len(call.selection)
    _count(
        call.selection.numpy(),
        call.row_lengths.numpy(),
        call.row_prefix.numpy(),
        np.ones(rows, np.bool_) if call.row_live is None else call.row_live.numpy(),
        np.ones(rows, np.int8) if call.row_phase is None else call.row_phase.numpy(),
        np.zeros(rows, np.int32) if call.row_arm is None else call.row_arm.numpy(),
        call.counting.numpy(),
        call.counters.numpy(),
    )


@numba.njit(cache=True, nogil=True)
def _count(selection, lengths, prefixes, live, phases, arms, counting, counters):  # type: ignore[no-untyped-def]
    for row in range(selection.shape[0]):
        arm = arms[row]
        visible = min(np.int64(prefixes[row]), np.int64(lengths[row]))
        if not live[row] or visible <= 0 or arm < 0 or arm >= len(counting) or counting[arm] == 0:
            continue
        selected = 0
        for slot in range(selection.shape[1]):
            selected += 0 <= selection[row, slot] < visible
        counts = counters[arm, 1 if phases[row] != 0 else 0]
        counts[0] += 1
        counts[1] += visible
        counts[2] += visible - selected
