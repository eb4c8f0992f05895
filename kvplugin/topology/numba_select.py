"""The selection of one row: structure is claimed, learned tokens make room for it, free slots are filled up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplugin.config import Eviction, Witness
from kvplugin.topology.counters import Counter
from kvplugin.topology.numba_args import EVICTIONS, WITNESSES, IntArray, KernelPolicy, RowFacts, Scores
from kvplugin.topology.numba_coverage import empty_segments, fill_segment, is_gap
from kvplugin.topology.numba_jit import inlined, kernel
from kvplugin.topology.numba_marks import Marks, entry_of, put_mark
from kvplugin.topology.numba_ranking import choose_leaving, rank_learned
from kvplugin.topology.numba_workspace import Lane

_KEEP_LEARNED, _COVERAGE = EVICTIONS.index(Eviction.NONE), WITNESSES.index(Witness.COVERAGE)


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


@inlined
def make_room(
    row: int,
    learned: int,
    hits: int,
    missing: int,
    facts: RowFacts,
    policy: KernelPolicy,
    scores: Scores,
    marks: Marks,
    lane: Lane,
    counts: NDArray[np.int64],
) -> tuple[int, int]:
    """Choose the learned tokens that leave a row longer than K, and the structural ones that come in.

    Coverage chooses twice: with slots reserved for every segment, to see which segments stay empty, then for good.

    Returns:
        The number that leaves, whose slots go to ``lane.slots``, and the number that comes in.
    """
    if policy.eviction == _KEEP_LEARNED:
        return 0, min(missing, policy.width - learned)
    coverage = policy.witness == _COVERAGE
    leaving = max(0, learned + missing + (policy.segments if coverage else 0) - policy.width)
    low, high = 0, 0
    if leaving > 0:
        low, high = rank_learned(lane.tokens, learned, row, facts, policy, scores, lane.spare, lane.keys)
        for i in range(hits):
            lane.keys[lane.slots[i]] = policy.highest_index
        choose_leaving(lane.tokens, lane.keys, learned, leaving, low, high, lane.spare, lane.slots)
    if coverage:
        earlier_missing = missing
        gaps_hit, missing = claim_gaps(learned, leaving, 0, missing, facts, policy.segments, marks, lane)
        counts[Counter.WITNESS_HIT.value] += gaps_hit
        counts[Counter.WITNESS_POSSIBLE.value] += gaps_hit + missing - earlier_missing
        leaving = max(0, learned + missing - policy.width)
        if leaving > 0:
            for i in range(gaps_hit):
                lane.keys[lane.slots[i]] = policy.highest_index
            choose_leaving(lane.tokens, lane.keys, learned, leaving, low, high, lane.spare, lane.slots)
    return leaving, missing


@kernel
def keep_structure(
    hits: int,
    missing: int,
    facts: RowFacts,
    policy: KernelPolicy,
    marks: Marks,
    lane: Lane,
    counts: NDArray[np.int64],
) -> tuple[int, int]:
    """``topology_only``: reduce ``lane.tokens`` to the structural ones, and mark these as such.

    Returns:
        Their number, and that of the structural tokens that come in.
    """
    if policy.witness == _COVERAGE:
        earlier_hits, earlier_missing = hits, missing
        hits, missing = claim_gaps(0, 0, hits, missing, facts, policy.segments, marks, lane)
        counts[Counter.WITNESS_HIT.value] += hits - earlier_hits
        counts[Counter.WITNESS_POSSIBLE.value] += hits - earlier_hits + missing - earlier_missing
    for i in range(hits):
        lane.keys[i] = lane.tokens[lane.slots[i]]
    for i in range(hits):
        token = lane.keys[i]
        lane.tokens[i] = token
        put_mark(marks, entry_of(marks, token), token, marks.structural)
    return hits, missing


@kernel
def grow_local(
    length: int, count: int, wanted: int, taken: int, marks: Marks, incoming: NDArray[np.int64]
) -> tuple[int, int]:
    """Grow the local window backwards: append the newest tokens marked below ``taken`` until ``count`` is ``wanted``.

    Returns:
        The count, and how many of the appended tokens were learned.
    """
    learned = 0
    token = length - 1
    while count < wanted and token >= 0:
        mark = marks.table[entry_of(marks, token)]
        if mark < taken:
            incoming[count] = token
            count += 1
            learned += mark >= marks.base
        token -= 1
    return count, learned


@kernel
def bring_in(
    tokens: IntArray, held: int, leaving: int, slots: NDArray[np.int32], incoming: NDArray[np.int64], count: int
) -> None:
    """Put ``incoming[:count]`` into the slots of the leaving tokens, then after the ``held`` ones."""
    for i in range(leaving):
        tokens[slots[i]] = incoming[i]
    for i in range(leaving, count):
        tokens[held + i - leaving] = incoming[i]
