"""The stable-prefix count, one row and one token at a time."""

from __future__ import annotations

from kvplugin.topology.prefix.call import PrefixCall
from kvplugin.topology.prefix.counters import PrefixCounter


def count_into(call: PrefixCall) -> None:
    """Add to ``call.counters``."""
    arms = len(call.counting)
    for row, selection in enumerate(call.selection.tolist()):
        arm = 0 if call.row_arm is None else int(call.row_arm[row])
        visible = min(int(call.row_prefix[row]), int(call.row_lengths[row]))
        live = call.row_live is None or bool(call.row_live[row])
        if not live or visible <= 0 or not 0 <= arm < arms or not call.counting[arm]:
            continue
        phase = 1 if call.row_phase is None or call.row_phase[row] else 0
        selected = sum(0 <= token < visible for token in selection)
        counts = call.counters[arm, phase]
        counts[PrefixCounter.ROWS] += 1
        counts[PrefixCounter.VISIBLE] += visible
        counts[PrefixCounter.UNSELECTED] += visible - selected
