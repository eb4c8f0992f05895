"""The policy for one row after another: read it, select, write it, count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplugin.config import Witness
from kvplugin.topology.counters import Counter
from kvplugin.topology.numba_args import WITNESSES, KernelPolicy, Matrix, RowFacts, Scores
from kvplugin.topology.numba_claim import claim_ranges
from kvplugin.topology.numba_coverage import count_gaps
from kvplugin.topology.numba_jit import entry, fetch_add, inlined, kernel, source_stamp
from kvplugin.topology.numba_marks import new_marks
from kvplugin.topology.numba_read import read_any, read_clean, row_values, write_row, write_slots
from kvplugin.topology.numba_select import bring_in, grow_local, keep_structure, make_room
from kvplugin.topology.numba_structure import structure_ranges
from kvplugin.topology.numba_workspace import Lane

_COVERAGE = WITNESSES.index(Witness.COVERAGE)

ROWS_AT_ONCE = 4
"""Few enough that threads finish together, many enough that they rarely meet at the cursor."""


class PolicyBatch(NamedTuple):
    """One call, as the threads that work on it share it.

    Python passes it as a plain tuple, which numba takes over in 2 microseconds less.

    Attributes:
        cursor: int64 ``[1]``, the first row that no thread has taken yet.
        block_scores: int64 ``[T, B]``, the bits of float64 witness scores; B = 0 without any.
        facts: one record a row, with the fields of :class:`RowFacts`.
        policies: one record, with the fields of :class:`KernelPolicy`.
    """

    cursor: NDArray[np.int64]
    topk: Matrix
    scores: Scores
    block_scores: NDArray[np.int64]
    facts: NDArray[np.void]
    policies: NDArray[np.void]


@kernel
def bypass_reason(facts: RowFacts, policy: KernelPolicy, columns: int) -> int:
    """Counter of the reason to leave a live row alone, or -1."""
    if policy.call_bypass >= 0:
        return policy.call_bypass
    if not (policy.acts_in_prefill if facts.phase == 0 else policy.acts_in_decode):
        return Counter.BYPASS_PHASE.value
    if facts.length > policy.max_row_length:
        return Counter.BYPASS_MAX_ROW_LENGTH.value
    if facts.offset < 0 or facts.offset - 1 > policy.highest_index - facts.length:
        return Counter.BYPASS_BAD_OFFSET.value
    if policy.needs_scores and facts.length > 0 and (facts.start < 0 or facts.start > columns - facts.length):
        return Counter.BYPASS_NO_SCORES.value
    return -1


@inlined
def apply_row(
    row: int,
    topk: Matrix,
    scores: Scores,
    block_scores: NDArray[np.int64],
    facts: RowFacts,
    policy: KernelPolicy,
    lane: Lane,
    counts: NDArray[np.int64],
) -> None:
    """Rewrite one live row that is not bypassed and not empty, and add what happened to ``counts``."""
    length, offset, width = facts.length, facts.offset, policy.width
    tokens, slots, incoming = lane.tokens, lane.slots, lane.incoming
    values = row_values(topk, row, width, lane.spare)
    marks = new_marks(lane.table, lane.owner, lane.epoch, length, width)
    learned, bad = width, 0
    clean = read_clean(values, offset, length, marks, tokens)
    if not clean:
        marks = new_marks(lane.table, lane.owner, lane.epoch, length, width)
        learned, bad = read_any(values, offset, length, policy.check_duplicates, marks, tokens, incoming)
        if bad > 0 and lane.error[0] == 0:
            lane.error[0], lane.error[1], lane.error[2], lane.error[3] = row + 1, incoming[0], offset, offset + length
    if policy.witness == _COVERAGE:
        gaps = count_gaps(tokens, learned, length, policy.segments, lane.bounds, lane.filled)
        counts[Counter.SEGMENTS_EMPTY_BEFORE.value] += gaps

    hits, missing, held, leaving = 0, 0, learned, 0
    falls_back = bad > 0 and policy.falls_back
    if not falls_back:
        ranges = structure_ranges(length, policy, block_scores, lane.drift, lane.starts, lane.stops)
        hits, missing = claim_ranges(ranges, lane.starts, lane.stops, marks, slots, incoming, counts)
        if policy.only:
            held, missing = keep_structure(hits, missing, facts, policy, marks, lane, counts)
        elif length > width:
            leaving, missing = make_room(row, learned, hits, missing, facts, policy, scores, marks, lane, counts)
    wanted = min(width, length) - (held - leaving) if policy.fill_local else missing
    taken = marks.structural if policy.only else marks.base
    added, relearned = grow_local(length, missing, wanted, taken, marks, incoming)
    bring_in(tokens, held, leaving, slots, incoming, added)
    kept, selected = held - leaving + relearned, held - leaving + added

    if policy.witness == _COVERAGE:
        counts[Counter.SEGMENTS.value] += min(length, policy.segments)
        gaps = count_gaps(tokens, selected, length, policy.segments, lane.bounds, lane.filled)
        counts[Counter.SEGMENTS_EMPTY_AFTER.value] += gaps
    _count_row(learned, bad, falls_back, kept, missing, selected, policy, counts)
    if not policy.observe:
        if clean and not policy.only:
            write_slots(topk, row, slots, incoming, leaving, offset)
        else:
            write_row(topk, row, width, tokens, selected, offset)


@inlined
def _count_row(
    learned: int,
    bad: int,
    falls_back: bool,
    kept: int,
    injected: int,
    selected: int,
    policy: KernelPolicy,
    counts: NDArray[np.int64],
) -> None:
    counts[Counter.KEPT.value] += kept
    counts[Counter.EVICTED.value] += learned - kept
    counts[Counter.INJECTED.value] += injected
    counts[Counter.BACKFILLED.value] += selected - kept - injected
    counts[Counter.INVALID.value] += bad
    counts[Counter.FALLBACK.value] += falls_back
    counts[Counter.RESCUED.value] += learned == 0
    counts[Counter.EMPTY.value] += (learned if policy.observe else selected) == 0
    identity = bad == 0 and kept == learned and kept == selected
    counts[Counter.IDENTITY.value if identity else Counter.REWRITTEN.value] += 1


@kernel
def lift_row(
    row: int,
    scores: Scores,
    block_scores: NDArray[np.int64],
    facts: RowFacts,
    policy: KernelPolicy,
    lane: Lane,
) -> None:
    """Raise the scores of one row's structural tokens to +inf."""
    ranges = structure_ranges(facts.length, policy, block_scores, lane.drift, lane.starts, lane.stops)
    at = row * scores.row_stride + facts.start * scores.column_stride
    for r in range(ranges):
        for token in range(lane.starts[r], lane.stops[r]):
            index = np.uintp(at + token * scores.column_stride)
            if scores.is_half:
                scores.half[index] = scores.infinity
            else:
                scores.single[index] = scores.infinity


@kernel
def handle_row(row: int, batch: PolicyBatch, policy: KernelPolicy, lane: Lane) -> None:
    """Rewrite one row if it is to be, and count it if it is live."""
    facts = batch.facts[row]
    if not facts.live or facts.length < 0:
        return
    counts = lane.counts[0 if facts.phase == 0 else 1]
    counts[Counter.SEEN.value] += 1
    reason = bypass_reason(facts, policy, batch.scores.columns)
    if reason >= 0:
        counts[reason] += 1
    elif facts.length > 0:
        apply_row(row, batch.topk, batch.scores, batch.block_scores[row], facts, policy, lane, counts)
    else:
        counts[Counter.IDENTITY.value] += 1
        if not policy.observe:
            write_row(batch.topk, row, policy.width, lane.tokens, facts.length, facts.offset)


def _entries(stamp: int) -> tuple[Callable[..., int], Callable[..., int]]:
    """Compile the kernels that Python calls. They return the stamp, which thereby belongs to their cache key."""

    @entry
    def apply_rows(parts: tuple[Any, ...], lane: Lane) -> int:
        batch = PolicyBatch(*parts)
        rows, policy = batch.facts.size, batch.policies[0]
        first = fetch_add(batch.cursor, ROWS_AT_ONCE)
        while first < rows:
            for row in range(first, min(first + ROWS_AT_ONCE, rows)):
                handle_row(row, batch, policy, lane)
            first = fetch_add(batch.cursor, ROWS_AT_ONCE)
        return stamp

    @entry
    def lift_rows(
        scores: Scores,
        block_scores: NDArray[np.int64],
        facts: NDArray[np.void],
        policies: NDArray[np.void],
        lane: Lane,
    ) -> int:
        policy = policies[0]
        for row in range(facts.size):
            row_facts = facts[row]
            if row_facts.live and row_facts.length > 0 and bypass_reason(row_facts, policy, scores.columns) < 0:
                lift_row(row, scores, block_scores[row], row_facts, policy, lane)
        return stamp

    return apply_rows, lift_rows


apply_rows, lift_rows = _entries(source_stamp())
