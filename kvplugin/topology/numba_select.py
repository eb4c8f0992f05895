"""The selection of one row: learned tokens make room for the structure that was claimed, free slots are filled up."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplugin.config import Eviction, Witness
from kvplugin.topology.counters import Counter
from kvplugin.topology.numba_args import EVICTIONS, WITNESSES, IntArray, KernelPolicy, RowFacts, Scores
from kvplugin.topology.numba_claim import claim_gaps
from kvplugin.topology.numba_jit import inlined, kernel
from kvplugin.topology.numba_marks import Marks, entry_of, put_mark
from kvplugin.topology.numba_ranking import choose_leaving, rank_learned
from kvplugin.topology.numba_workspace import Lane

_KEEP_LEARNED, _COVERAGE = EVICTIONS.index(Eviction.NONE), WITNESSES.index(Witness.COVERAGE)


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
