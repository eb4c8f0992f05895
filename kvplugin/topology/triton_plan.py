"""Deciding one row's selection, for kernels: from what was read to the plan of :mod:`kvplugin.topology.triton_row`."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplugin.config import Fill, MismatchAction, Mode
from kvplugin.topology.triton_row import (
    EVICTION,
    NOTHING_LEAVES,
    candidates,
    eviction_cut,
    eviction_keys,
    keep_all,
    keep_none,
    no_keys,
    read_slots,
    stays,
)
from kvplugin.topology.triton_segments import empty_segments, last_tokens, tokens_per_segment
from kvplugin.topology.triton_structure import (
    COVERAGE,
    FAR,
    SEGMENTS,
    WITNESS,
    block_witnesses,
    column,
    is_structural,
    structure_size,
    windows,
)

MODE, MISMATCH, FILL = column("mode"), column("mismatch"), column("fill")
CHECK_DUPLICATES = column("check_duplicates")
OBSERVE = tl.constexpr(list(Mode).index(Mode.OBSERVE))
ONLY = tl.constexpr(list(Mode).index(Mode.ONLY))
DROP = tl.constexpr(list(MismatchAction).index(MismatchAction.DROP))
RAISE = tl.constexpr(list(MismatchAction).index(MismatchAction.RAISE))
FILL_LOCAL = tl.constexpr(list(Fill).index(Fill.LOCAL))


@triton.jit
def _count(mask):
    return tl.sum(mask.to(tl.int32), 0)


@triton.jit
def _census(token, valid, bad, structural, sinks, local_start):
    """Of one tile: valid and bad slots, and learned sinks, local and witness tokens."""
    sink = valid & (token < sinks)
    local = valid & (token >= local_start)
    witness = valid & structural & (token >= sinks) & (token < local_start)
    return _count(valid), _count(bad), _count(sink), _count(local), _count(witness)


@triton.jit
def take_census(row, tile, structure, LISTED: tl.constexpr, BLOCK: tl.constexpr, ONE_TILE: tl.constexpr):
    """:func:`_census` of the whole row; ``tile`` holds its first tile's tokens, valid, bad and structural slots."""
    token, valid, bad, structural = tile
    found, wrong, sink, local, witness = _census(token, valid, bad, structural, structure[0], structure[1])
    if not ONE_TILE:
        for first in range(BLOCK, row[2], BLOCK):
            _, token, valid, bad = read_slots(row, first, BLOCK)
            structural = is_structural(token, structure, LISTED)
            more = _census(token, valid, bad, structural, structure[0], structure[1])
            found += more[0]
            wrong += more[1]
            sink += more[2]
            local += more[3]
            witness += more[4]
    return found, wrong, sink, local, witness


@triton.jit
def _staying(
    row,
    first,
    structure,
    structure_from,
    cut,
    policy,
    scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """One tile of a row read again: tokens, valid slots, and the slots that stay."""
    value, token, valid, _ = read_slots(row, first, BLOCK)
    candidate = candidates(token, valid, is_structural(token, structure, LISTED), structure_from)
    key = eviction_keys(token, candidate, first, policy, scores, row[2], BLOCK, HAS_SCORES)
    return value, token, valid, stays(token, candidate, key, cut)


@triton.jit
def _gaps(
    row,
    tile,
    structure,
    cut,
    policy,
    scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """Witnesses of ``coverage``: the last tokens of segments without a window token or one that stays."""
    length = row[4]
    count = tl.load(policy + SEGMENTS).to(tl.int32)
    token, staying = tile
    found = tl.full((LISTED,), 0, tl.int32)
    if ONE_TILE:
        found += tokens_per_segment(token, staying, length, count, LISTED)
    else:
        for first in range(0, row[2], BLOCK):
            _, also, _, more = _staying(row, first, structure, 0, cut, policy, scores, LISTED, BLOCK, HAS_SCORES)
            found += tokens_per_segment(also, more, length, count, LISTED)
    empty = empty_segments(found, structure[0], structure[1], length, count, LISTED)
    return last_tokens(empty, length, count, LISTED)


@triton.jit
def _from_which_free(free, row, tile, structure, LISTED: tl.constexpr, BLOCK: tl.constexpr, ONE_TILE: tl.constexpr):
    """Where the newest ``free`` structural tokens that were not learned begin: the largest such token."""
    length = row[4]
    token, structural = tile
    low, high = tl.full((), 0, tl.int32), length
    while low < high:
        middle = low + (high - low + 1) // 2
        known = tl.full((), 0, tl.int32)
        if ONE_TILE:
            known = _count(structural & (token >= middle))
        else:
            for first in range(0, row[2], BLOCK):
                _, also, more, _ = read_slots(row, first, BLOCK)
                known += _count(more & (also >= middle) & is_structural(also, structure, LISTED))
        enough = structure_size(structure, length, middle, LISTED) - known >= free
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _grown_window(
    free,
    row,
    tile,
    structure,
    structure_from,
    cut,
    policy,
    scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """Start of the local window once the newest ``free`` unselected tokens belong to it."""
    width, length = row[2], row[4]
    token, staying = tile
    # Selected and backfilled tokens are no more than slots, so the backfilled ones are among that many newest tokens.
    low, high = tl.maximum(length - width, 0), length
    while low < high:
        middle = low + (high - low + 1) // 2
        taken = structure_size(structure, length, tl.maximum(middle, structure_from), LISTED)
        if ONE_TILE:
            taken += _count(staying & (token >= middle))
        else:
            for first in range(0, width, BLOCK):
                _, also, _, more = _staying(
                    row, first, structure, structure_from, cut, policy, scores, LISTED, BLOCK, HAS_SCORES
                )
                taken += _count(more & (also >= middle))
        enough = length - middle - taken >= free
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def plan_row(
    row,
    policy,
    scores,
    block_scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    HAS_BLOCK_SCORES: tl.constexpr,
):
    """Decide a row of L >= 0.

    Args:
        row: see :mod:`kvplugin.topology.triton_row`.
        policy: pointer to its row of the policy table.
        scores: pointer to the score of its token 0, and the stride between scores.
        block_scores: pointer to the score of its block 0, and the number of blocks.

    Returns:
        ``(structure, structure_from, window_start, cut)``, its first tile, ``(value, token, valid, structural, key)``,
        and the counts ``(falls_back, valid, bad, sink, local and witness tokens learned)``.
    """
    width, length = row[2], row[4]
    mode, rule = tl.load(policy + MODE), tl.load(policy + EVICTION)
    value, token, valid, bad = read_slots(row, 0, BLOCK)
    sinks, local_start = windows(policy, length)
    stride, count, span, starts = block_witnesses(
        policy, length, sinks, local_start, block_scores[0], block_scores[1], LISTED, HAS_BLOCK_SCORES
    )
    structure = (sinks, local_start, (stride, count, span, starts))
    structural = is_structural(token, structure, LISTED)
    found, wrong, sink, local, witness = take_census(
        row, (token, valid, bad, structural), structure, LISTED, BLOCK, ONE_TILE
    )
    falls_back = (wrong > 0) & (mode != ONLY) & (tl.load(policy + MISMATCH) != DROP)
    if falls_back:
        # The structure of an empty row: none.
        sinks, sink = sinks * 0, sink * 0
        local_start, local = length, local * 0
        count, witness = count * 0, witness * 0
        starts = tl.maximum(starts, FAR)
    structural &= falls_back == 0
    structure = (sinks, local_start, (stride, count, span, starts))

    budget = tl.minimum(width, length)
    whole = ((length <= width) & (mode != ONLY) & (falls_back == 0)) | (length == 0)
    covers = (tl.load(policy + WITNESS) == COVERAGE) & (falls_back == 0) & (whole == 0)
    evicts = (mode != ONLY) & (whole == 0) & (rule != NOTHING_LEAVES)
    cut = keep_all()
    if mode == ONLY:
        cut = keep_none()
    candidate = candidates(token, valid, structural, 0)
    key = no_keys(candidate)
    learned = sink + local + witness
    need = found - learned - (budget - structure_size(structure, length, 0, LISTED))
    if LISTED > 1:
        if covers:
            reserved = tl.load(policy + SEGMENTS).to(tl.int32)
            if evicts & (need + reserved > 0):
                key = eviction_keys(token, candidate, 0, policy, scores, width, BLOCK, HAS_SCORES)
                cut = eviction_cut(
                    need + reserved, (token, key), row, structure, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES
                )
            staying = stays(token, candidate, key, cut)
            starts = _gaps(row, (token, staying), structure, cut, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES)
            stride, count, span = stride * 0, count * 0, tl.full((), 1, tl.int32)
            structure = (sinks, local_start, (stride, count, span, starts))
            structural = is_structural(token, structure, LISTED)
            _, _, _, _, witness = take_census(row, (token, valid, bad, structural), structure, LISTED, BLOCK, ONE_TILE)
            learned = sink + local + witness
            need = found - learned - (budget - structure_size(structure, length, 0, LISTED))
            candidate = candidates(token, valid, structural, 0)
            key = no_keys(candidate)
            if evicts:
                cut = keep_all()
    if evicts & (need > 0):
        key = eviction_keys(token, candidate, 0, policy, scores, width, BLOCK, HAS_SCORES)
        cut = eviction_cut(need, (token, key), row, structure, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES)

    structure_from = tl.full((), 0, tl.int32)
    window_start = local_start
    staying_count = found - learned - tl.maximum(need, 0)
    if mode == ONLY:
        staying_count = staying_count * 0
    if whole:
        window_start = window_start * 0
        staying_count = staying_count * 0
    elif (mode != ONLY) & (rule == NOTHING_LEAVES):
        # Every learned token stays in its slot, structural ones too; the structure comes in as far as slots are free.
        size = structure_size(structure, length, 0, LISTED)
        free = budget - found
        if free < size - learned:
            structure_from = length
            if free > 0:
                structure_from = _from_which_free(
                    free, row, (token, valid & structural), structure, LISTED, BLOCK, ONE_TILE
                )
            window_start = tl.maximum(local_start, structure_from)
            candidate = candidates(token, valid, structural, structure_from)
            key = no_keys(candidate)
            free = free * 0
        else:
            free = free - (size - learned)
        staying_count = budget - free - structure_size(structure, length, structure_from, LISTED)
    if whole == 0:
        free = budget - staying_count - structure_size(structure, length, structure_from, LISTED)
        if (free > 0) & ((mode != ONLY) | (tl.load(policy + FILL) == FILL_LOCAL)):
            staying = stays(token, candidate, key, cut)
            window_start = _grown_window(
                free,
                row,
                (token, staying),
                structure,
                structure_from,
                cut,
                policy,
                scores,
                LISTED,
                BLOCK,
                ONE_TILE,
                HAS_SCORES,
            )
    plan = (structure, structure_from, window_start, cut)
    return plan, (value, token, valid, structural, key), (falls_back, found, wrong, sink, local, witness)
