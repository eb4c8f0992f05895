"""From a row's plan to its new slots and its counts, for kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplugin.topology.counters import Counter
from kvplugin.topology.triton_admit import CELLS, SEEN
from kvplugin.topology.triton_plan import MODE, OBSERVE
from kvplugin.topology.triton_row import candidates, eviction_keys, read_slots, stays
from kvplugin.topology.triton_segments import empty_segments, tokens_per_segment
from kvplugin.topology.triton_structure import (
    COVERAGE,
    SEGMENTS,
    WITNESS,
    is_structural,
    structural_token,
    structure_size,
)

REWRITTEN, IDENTITY = tl.constexpr(int(Counter.REWRITTEN)), tl.constexpr(int(Counter.IDENTITY))
RESCUED, FALLBACK = tl.constexpr(int(Counter.RESCUED)), tl.constexpr(int(Counter.FALLBACK))
EMPTY, INVALID = tl.constexpr(int(Counter.EMPTY)), tl.constexpr(int(Counter.INVALID))
KEPT, EVICTED = tl.constexpr(int(Counter.KEPT)), tl.constexpr(int(Counter.EVICTED))
INJECTED, BACKFILLED = tl.constexpr(int(Counter.INJECTED)), tl.constexpr(int(Counter.BACKFILLED))
SINK_HIT, SINK_POSSIBLE = tl.constexpr(int(Counter.SINK_HIT)), tl.constexpr(int(Counter.SINK_POSSIBLE))
LOCAL_HIT, LOCAL_POSSIBLE = tl.constexpr(int(Counter.LOCAL_HIT)), tl.constexpr(int(Counter.LOCAL_POSSIBLE))
WITNESS_HIT, WITNESS_POSSIBLE = tl.constexpr(int(Counter.WITNESS_HIT)), tl.constexpr(int(Counter.WITNESS_POSSIBLE))
ALL_SEGMENTS = tl.constexpr(int(Counter.SEGMENTS))
EMPTY_BEFORE, EMPTY_AFTER = (
    tl.constexpr(int(Counter.SEGMENTS_EMPTY_BEFORE)),
    tl.constexpr(int(Counter.SEGMENTS_EMPTY_AFTER)),
)


@triton.jit
def read_tile(row, first, plan, policy, scores, LISTED: tl.constexpr, BLOCK: tl.constexpr, HAS_SCORES: tl.constexpr):
    """A tile of a planned row: values, tokens, valid and structural slots, eviction keys."""
    value, token, valid, _ = read_slots(row, first, BLOCK)
    structural = is_structural(token, plan[0], LISTED)
    candidate = candidates(token, valid, structural, plan[1])
    key = eviction_keys(token, candidate, first, policy, scores, row[2], BLOCK, HAS_SCORES)
    return value, token, valid, structural, key


@triton.jit
def staying_slots(tile, plan):
    """Slots whose token stays where it is."""
    _, token, valid, structural, key = tile
    _, structure_from, window_start, cut = plan
    candidate = candidates(token, valid, structural, structure_from)
    return stays(token, candidate, key, cut) & (token < window_start)


@triton.jit
def incoming(plan, LISTED: tl.constexpr):
    """The structure with its window as grown: what takes the slots that do not stay."""
    structure, _, window_start, _ = plan
    sinks, _, witnesses = structure
    return tl.minimum(sinks, window_start), window_start, witnesses


@triton.jit
def changing_slots(tile, first, row, plan, BLOCK: tl.constexpr):
    """How many slots of a tile take an incoming token, or none."""
    inside = first + tl.arange(0, BLOCK) < row[2]
    return tl.sum((inside & (staying_slots(tile, plan) == 0)).to(tl.int32), 0)


@triton.jit
def renewed_slots(tile, first, taken, row, plan, LISTED: tl.constexpr, BLOCK: tl.constexpr):
    """New values of a tile, and which slots change.

    Args:
        tile: see :func:`read_tile`.
        taken: incoming tokens that earlier tiles hold.
    """
    _, _, width, low, length, _ = row
    value = tile[0]
    changes = (first + tl.arange(0, BLOCK) < width) & (staying_slots(tile, plan) == 0)
    rank = taken + tl.cumsum(changes.to(tl.int32), 0) - 1
    structure = incoming(plan, LISTED)
    token = structural_token(rank, structure, length, plan[1], LISTED)
    comes = rank < structure_size(structure, length, plan[1], LISTED)
    new = tl.where(comes, token.to(value.dtype) + low.to(value.dtype), -1)
    return tl.where(changes, new, value), changes


@triton.jit
def count_tile(tile, plan):
    """Of one tile: slots that stay, learned tokens that are selected, and learned tokens of the structure coming in."""
    _, token, valid, structural, _ = tile
    _, structure_from, window_start, _ = plan
    staying = staying_slots(tile, plan)
    known = valid & structural & (token >= structure_from)
    kept = staying | known | (valid & (token >= window_start))
    return tl.sum(staying.to(tl.int32), 0), tl.sum(kept.to(tl.int32), 0), tl.sum(known.to(tl.int32), 0)


@triton.jit
def _cell(counter: tl.constexpr, value):
    return tl.where(tl.arange(0, CELLS) == counter, value, 0)


@triton.jit
def count_row(census, totals, gaps, row, plan, policy, LISTED: tl.constexpr):
    """Counts of a row: int32 ``[CELLS]``.

    Args:
        census: the counts of :func:`kvplugin.topology.triton_plan.plan_row`.
        totals: :func:`count_tile` over all tiles.
        gaps: coverage segments of the row, those without a learned token and those without a selected one.
    """
    falls_back, found, wrong, sink, local, witness = census
    staying, kept, known = totals
    structure, structure_from, _, _ = plan
    sinks, local_start, _ = structure
    length = row[4]
    size = structure_size(structure, length, 0, LISTED)
    selected = staying + structure_size(incoming(plan, LISTED), length, structure_from, LISTED)
    injected = structure_size(structure, length, structure_from, LISTED) - known
    same = (wrong == 0) & (kept == found) & (kept == selected)
    observed = tl.load(policy + MODE) == OBSERVE
    counts = _cell(SEEN, 1) + _cell(IDENTITY, same.to(tl.int32)) + _cell(REWRITTEN, (same == 0).to(tl.int32))
    sees = length > 0
    counts += _cell(RESCUED, (sees & (found == 0)).to(tl.int32)) + _cell(FALLBACK, falls_back.to(tl.int32))
    counts += _cell(EMPTY, (sees & (tl.where(observed, found, selected) == 0)).to(tl.int32)) + _cell(INVALID, wrong)
    counts += _cell(KEPT, kept) + _cell(EVICTED, found - kept)
    counts += _cell(INJECTED, injected) + _cell(BACKFILLED, selected - kept - injected)
    counts += _cell(SINK_HIT, sink) + _cell(SINK_POSSIBLE, sinks)
    counts += _cell(LOCAL_HIT, local) + _cell(LOCAL_POSSIBLE, length - local_start)
    counts += _cell(WITNESS_HIT, witness) + _cell(WITNESS_POSSIBLE, size - sinks - (length - local_start))
    counts += _cell(ALL_SEGMENTS, gaps[0]) + _cell(EMPTY_BEFORE, gaps[1]) + _cell(EMPTY_AFTER, gaps[2])
    return counts


@triton.jit
def count_gaps(
    tile,
    row,
    plan,
    policy,
    scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """Coverage segments of a row, those without a learned token and those without a selected one."""
    all_segments, before, after = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
    length = row[4]
    if LISTED > 1:
        if (tl.load(policy + WITNESS) == COVERAGE) & (length > 0):
            count = tl.load(policy + SEGMENTS).to(tl.int32)
            structure, structure_from, window_start, _ = plan
            learned = tokens_per_segment(tile[1], tile[2], length, count, LISTED)
            staying = tokens_per_segment(tile[1], staying_slots(tile, plan), length, count, LISTED)
            if not ONE_TILE:
                for first in range(BLOCK, row[2], BLOCK):
                    more = read_tile(row, first, plan, policy, scores, LISTED, BLOCK, HAS_SCORES)
                    learned += tokens_per_segment(more[1], more[2], length, count, LISTED)
                    staying += tokens_per_segment(more[1], staying_slots(more, plan), length, count, LISTED)
            all_segments = tl.minimum(length, count)
            none = length * 0
            before = tl.sum(empty_segments(learned, none, length, length, count, LISTED).to(tl.int32), 0)
            starts = structure[2][3]
            witnesses = (starts >= structure_from) & (starts < tl.minimum(window_start, length))
            staying += tokens_per_segment(tl.where(witnesses, starts, 0), witnesses, length, count, LISTED)
            sinks = tl.minimum(structure[0], window_start)
            after = tl.sum(empty_segments(staying, sinks, window_start, length, count, LISTED).to(tl.int32), 0)
    return all_segments, before, after


@triton.jit
def record_error(error, r, row, BLOCK: tl.constexpr):
    """Record the first bad slot of a row, unless an error is recorded already."""
    if tl.atomic_cas(error, tl.full((), 0, tl.int64), (r + 1).to(tl.int64)) == 0:
        pointer, stride, width, low, length, _ = row
        slot = width
        for first in range(0, width, BLOCK):
            _, _, _, bad = read_slots(row, first, BLOCK)
            found = tl.min(tl.where(bad, first + tl.arange(0, BLOCK), width), 0)
            slot = tl.minimum(slot, found)
        tl.store(error + 1, tl.load(pointer + slot * stride).to(tl.int64))
        tl.store(error + 2, low)
        tl.store(error + 3, low + length)
