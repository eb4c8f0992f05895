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
    """One tile of a row read again: tokens, and the slots that stay."""
    tile = read_slots(row, first, BLOCK)
    token, valid = tile[1], tile[2]
    candidate = candidates(token, valid, is_structural(token, structure, LISTED), structure_from)
    key = eviction_keys(token, candidate, first, policy, scores, row[2], BLOCK, HAS_SCORES)
    return token, stays(token, candidate, key, cut)


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
            also, more = _staying(row, first, structure, 0, cut, policy, scores, LISTED, BLOCK, HAS_SCORES)
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
                again = read_slots(row, first, BLOCK)
                known += _count(again[2] & (again[1] >= middle) & is_structural(again[1], structure, LISTED))
        enough = structure_size(structure, length, middle, LISTED) - known >= free
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _staying_from(
    low,
    row,
    tile,
    plan,
    policy,
    scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """How many learned tokens from ``low`` on stay; ``tile`` holds tokens and staying slots of a row of one tile."""
    structure, structure_from, cut = plan[0], plan[1], plan[3]
    token, staying = tile
    count = tl.full((), 0, tl.int32)
    if ONE_TILE:
        count = _count(staying & (token >= low))
    else:
        for first in range(0, row[2], BLOCK):
            also, more = _staying(row, first, structure, structure_from, cut, policy, scores, LISTED, BLOCK, HAS_SCORES)
            count += _count(more & (also >= low))
    return count


@triton.jit
def _grown_window(
    budget,
    row,
    tile,
    plan,
    policy,
    scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """Start of the local window once it also holds the newest unselected tokens, so that ``budget`` are selected."""
    structure, structure_from, window_start, _ = plan
    length = row[4]
    selected = structure_size(structure, length, structure_from, LISTED)
    selected += _staying_from(0, row, tile, plan, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES)
    low = window_start
    if selected < budget:
        # Selected and backfilled tokens are no more than slots, so the backfilled ones are among that many newest ones.
        low, high = tl.maximum(length - row[2], 0), length
        while low < high:
            middle = low + (high - low + 1) // 2
            taken = structure_size(structure, length, tl.maximum(middle, structure_from), LISTED)
            taken += _staying_from(middle, row, tile, plan, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES)
            enough = length - middle - taken >= budget - selected
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
    return low


@triton.jit
def _cover(
    need,
    evicts,
    row,
    tile,
    structure,
    policy,
    scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """First token of each witness of ``coverage``: of segments that windows and the best learned tokens miss.

    The best are those that stay once a slot is reserved for each segment: ``need`` leave without that.
    """
    token, candidate = tile
    key = no_keys(candidate)
    cut = keep_all()
    if evicts == 0:
        cut = keep_none()
    need += tl.load(policy + SEGMENTS).to(tl.int32)
    if evicts & (need > 0):
        key = eviction_keys(token, candidate, 0, policy, scores, row[2], BLOCK, HAS_SCORES)
        cut = eviction_cut(need, (token, key), row, structure, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES)
    staying = stays(token, candidate, key, cut)
    return _gaps(row, (token, staying), structure, cut, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES)


@triton.jit
def _into_free_slots(
    free, learned, row, structural, structure, LISTED: tl.constexpr, BLOCK: tl.constexpr, ONE_TILE: tl.constexpr
):
    """From which token on the structure comes in where nothing learned leaves: its newest tokens, into ``free`` slots.

    Args:
        learned: structural tokens that were learned; ``structural`` holds tokens and those slots of a row of one tile.
    """
    structure_from = tl.full((), 0, tl.int32)
    if free < structure_size(structure, row[4], 0, LISTED) - learned:
        structure_from = row[4]
        if free > 0:
            structure_from = _from_which_free(free, row, structural, structure, LISTED, BLOCK, ONE_TILE)
    return structure_from


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
    length, budget = row[4], tl.minimum(row[2], row[4])
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
    whole = ((length <= row[2]) & (mode != ONLY)) | (length == 0)
    evicts = (mode != ONLY) & (whole == 0) & (rule != NOTHING_LEAVES)
    candidate = candidates(token, valid, structural, 0)
    need = found - (sink + local + witness) - (budget - structure_size(structure, length, 0, LISTED))
    if LISTED > 1:
        if (tl.load(policy + WITNESS) == COVERAGE) & (falls_back == 0) & (whole == 0):
            starts = _cover(
                need, evicts, row, (token, candidate), structure, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES
            )
            stride, count, span = stride * 0, count * 0, tl.full((), 1, tl.int32)
            structure = (sinks, local_start, (stride, count, span, starts))
            structural = is_structural(token, structure, LISTED)
            _, _, _, _, witness = take_census(row, (token, valid, bad, structural), structure, LISTED, BLOCK, ONE_TILE)
            need = found - (sink + local + witness) - (budget - structure_size(structure, length, 0, LISTED))
            candidate = candidates(token, valid, structural, 0)

    key = no_keys(candidate)
    cut = keep_all()
    structure_from, window_start = tl.full((), 0, tl.int32), local_start
    if (mode == ONLY) | whole:
        cut = keep_none()
    elif rule == NOTHING_LEAVES:
        structure_from = _into_free_slots(
            budget - found,
            sink + local + witness,
            row,
            (token, valid & structural),
            structure,
            LISTED,
            BLOCK,
            ONE_TILE,
        )
        window_start = tl.maximum(local_start, structure_from)
        candidate = candidates(token, valid, structural, structure_from)
        key = no_keys(candidate)
    elif need > 0:
        key = eviction_keys(token, candidate, 0, policy, scores, row[2], BLOCK, HAS_SCORES)
        cut = eviction_cut(need, (token, key), row, structure, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES)
    if whole:
        window_start = window_start * 0
    elif (mode != ONLY) | (tl.load(policy + FILL) == FILL_LOCAL):
        plan = (structure, structure_from, window_start, cut)
        staying = stays(token, candidate, key, cut)
        window_start = _grown_window(
            budget, row, (token, staying), plan, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES
        )
    plan = (structure, structure_from, window_start, cut)
    return plan, (value, token, valid, structural, key), (falls_back, found, wrong, sink, local, witness)
