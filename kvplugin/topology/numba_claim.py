"""Claiming structural tokens: those that were learned keep their slots, the others are to come in."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplugin.topology.counters import Counter
from kvplugin.topology.numba_args import RowFacts
from kvplugin.topology.numba_coverage import empty_segments, fill_segment, is_gap
from kvplugin.topology.numba_jit import inlined, kernel
from kvplugin.topology.numba_marks import Marks, entry_of, put_mark
from kvplugin.topology.numba_workspace import Lane


@kernel
def claim_ranges(
    ranges: int,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    marks: Marks,
    slots: NDArray[np.int32],
    incoming: NDArray[np.int64],
    counts: NDArray[np.int64],
) -> tuple[int, int]:
    """Mark the structural set, newest token first.

    Returns:
        The number of learned ones, whose slots go to ``slots``, and that of the others, which go to ``incoming``.
    """
    hits, missing = 0, 0
    for r in range(ranges - 1, -1, -1):
        earlier_hits, earlier_missing = hits, missing
        for token in range(stops[r] - 1, starts[r] - 1, -1):
            hits, missing = _claim(token, hits, missing, marks, slots, incoming)
        hit, possible = Counter.WITNESS_HIT.value, Counter.WITNESS_POSSIBLE.value
        if r == 0:
            hit, possible = Counter.SINK_HIT.value, Counter.SINK_POSSIBLE.value
        elif r == ranges - 1:
            hit, possible = Counter.LOCAL_HIT.value, Counter.LOCAL_POSSIBLE.value
        counts[hit] += hits - earlier_hits
        counts[possible] += hits - earlier_hits + missing - earlier_missing
    return hits, missing


@inlined
def _claim(
    token: int, hits: int, missing: int, marks: Marks, slots: NDArray[np.int32], incoming: NDArray[np.int64]
) -> tuple[int, int]:
    index = entry_of(marks, token)
    mark = marks.table[index]
    if mark >= marks.base:
        slots[hits] = mark - marks.base
        return hits + 1, missing
    put_mark(marks, index, token, marks.structural)
    incoming[missing] = token
    return hits, missing + 1


@kernel
def claim_gaps(
    learned: int, leaving: int, hits: int, missing: int, facts: RowFacts, segments: int, marks: Marks, lane: Lane
) -> tuple[int, int]:
    """Coverage: claim the last token of each segment without one.

    Segments are occupied by sinks, local window and ``lane.tokens[:learned]``, those in ``lane.slots[:leaving]`` aside.
    The slots of learned tokens that are claimed go to ``lane.slots``, after the first ``hits``.
    """
    length = facts.length
    empty_segments(length, segments, lane.bounds, lane.filled)
    for r in range(2):
        for token in range(lane.starts[r], lane.stops[r]):
            fill_segment(token, length, segments, lane.bounds, lane.filled)
    next_leaving = 0
    for j in range(learned):
        if next_leaving < leaving and lane.slots[next_leaving] == j:
            next_leaving += 1
        else:
            fill_segment(lane.tokens[j], length, segments, lane.bounds, lane.filled)
    for s in range(segments):
        if is_gap(s, lane.bounds, lane.filled):
            hits, missing = _claim(lane.bounds[s + 1] - 1, hits, missing, marks, lane.slots, lane.incoming)
    return hits, missing
