"""The policy in plain Python: sets and one sort a row, obviously right. The oracle of every other implementation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import torch

from kvplugin.config import Eviction, Fill, MismatchAction, Mode, Witness
from kvplugin.topology.call import LiftCall, PolicyCall
from kvplugin.topology.counters import Counter
from kvplugin.topology.params import PolicyParams


class Structure(NamedTuple):
    """The structural set of one row; each token belongs to one kind."""

    sink: set[int]
    local: set[int]
    witness: set[int]

    @property
    def all(self) -> set[int]:
        return self.sink | self.local | self.witness


class Selection(NamedTuple):
    """What one row attends to, and the structure that was asked for."""

    tokens: list[int]
    structure: Structure


def window_structure(length: int, p: PolicyParams) -> tuple[set[int], set[int]]:
    """Sinks ``[0, sink)`` and the local window ``[L - local, L)``, or the same in blocks."""
    blocks = -(-length // p.block_size)
    sinks = set(range(min(p.sink_tokens, length)))
    start = (blocks - p.local) * p.block_size if p.local_in_blocks else length - p.local
    return sinks, set(range(max(0, start), length)) - sinks


def block_tokens(block: int, length: int, p: PolicyParams) -> set[int]:
    return set(range(block * p.block_size, min((block + 1) * p.block_size, length)))


def witness_block_ids(
    length: int, p: PolicyParams, windows: set[int], block_scores: Sequence[float] | None
) -> list[int]:
    """Blocks of the ``uniform`` and ``drift`` witnesses."""
    blocks = -(-length // p.block_size)
    if p.witness is Witness.UNIFORM:
        step = max(1, blocks // (p.witness_blocks + 1))
        return [step * i for i in range(1, p.witness_blocks + 1) if step * i < blocks]
    if p.witness is Witness.DRIFT and block_scores is not None:
        free = [b for b in range(min(blocks, len(block_scores))) if not windows & block_tokens(b, length, p)]
        return sorted(free, key=lambda b: (-_or_lowest(block_scores[b]), b))[: p.witness_blocks]
    return []


def structure_of(length: int, p: PolicyParams, block_scores: Sequence[float] | None) -> Structure:
    sink, local = window_structure(length, p)
    windows = sink | local
    witness: set[int] = set()
    for block in witness_block_ids(length, p, windows, block_scores):
        witness |= block_tokens(block, length, p)
    return Structure(sink, local, witness - windows)


def segments(length: int, p: PolicyParams) -> list[range]:
    """Coverage segments that hold at least one token of the row."""
    bounds = [s * length // p.segments for s in range(p.segments + 1)]
    return [range(a, b) for a, b in pairwise(bounds) if a < b]


def empty_segments(tokens: set[int], length: int, p: PolicyParams) -> list[range]:
    filled = {segment for segment in segments(length, p) if not tokens.isdisjoint(segment)}
    return [segment for segment in segments(length, p) if segment not in filled]


def newest_first(length: int, taken: set[int], count: int) -> list[int]:
    """The local window grown backwards: the ``count`` highest tokens of the row that are not taken."""
    found: list[int] = []
    token = length - 1
    while len(found) < count and token >= 0:
        if token not in taken:
            found.append(token)
        token -= 1
    return found


def _or_lowest(score: float) -> float:
    return -math.inf if math.isnan(score) else score


def best_first(learned: Sequence[int], p: PolicyParams, score_of: Mapping[int, float]) -> list[int]:
    """Learned tokens in the order in which they keep their slots."""
    if p.eviction is Eviction.LOWEST_SCORE:
        return sorted(learned, key=lambda token: (-_or_lowest(score_of[token]), token))
    if p.eviction is Eviction.OLDEST:
        return sorted(learned, reverse=True)
    return list(learned)


def select(
    learned: list[int],
    length: int,
    p: PolicyParams,
    *,
    mismatch: bool,
    score_of: Mapping[int, float],
    block_scores: Sequence[float] | None,
) -> Selection:
    """The selection of one row.

    Args:
        learned: its unique valid learned tokens, in slot order.
        length: L > 0.
        mismatch: the row held bad indices and falls back.
        score_of: score of each learned token, where the policy needs scores.
    """
    budget = min(p.width, length)
    known = set(learned)
    if p.mode is Mode.ONLY:
        structure = structure_of(length, p, block_scores)
        if p.witness is Witness.COVERAGE:
            structure = _with_gaps(structure, structure.all, length, p)
        tokens = list(structure.all)
        count = budget if p.fill is Fill.LOCAL else 0
        return Selection(tokens + newest_first(length, structure.all, count - len(tokens)), structure)
    if mismatch:
        return Selection(learned + newest_first(length, known, budget - len(learned)), Structure(set(), set(), set()))
    structure = structure_of(length, p, block_scores)
    structural = structure.all
    if length <= p.width:
        return Selection(list(range(length)), structure)
    if p.eviction is Eviction.NONE:
        tokens = learned + sorted(structural - known, reverse=True)[: budget - len(learned)]
        return Selection(tokens + newest_first(length, set(tokens), budget - len(tokens)), structure)
    ranked = best_first([token for token in learned if token not in structural], p, score_of)
    if p.witness is Witness.COVERAGE:
        kept = ranked[: budget - p.segments - len(structural)]
        structure = _with_gaps(structure, structural | set(kept), length, p)
        structural = structure.all
        ranked = kept + [token for token in ranked[len(kept) :] if token not in structural]
    tokens = list(structural) + ranked[: budget - len(structural)]
    return Selection(tokens + newest_first(length, set(tokens), budget - len(tokens)), structure)


def _with_gaps(structure: Structure, occupied: set[int], length: int, p: PolicyParams) -> Structure:
    """Coverage: the last token of each segment that holds no occupied token becomes a witness."""
    return structure._replace(witness={segment[-1] for segment in empty_segments(occupied, length, p)})


def call_bypass(p: PolicyParams, rows: int) -> Counter | None:
    """Reason to leave the whole call alone, known from shapes."""
    if p.width > p.max_width:
        return Counter.BYPASS_MAX_WIDTH
    if rows > p.max_rows:
        return Counter.BYPASS_MAX_ROWS
    if rows * p.width > p.max_elements:
        return Counter.BYPASS_MAX_ELEMENTS
    return None


def row_bypass(
    length: int, offset: int, start: int, phase: int, columns: int | None, call: PolicyCall
) -> Counter | None:
    """Reason to leave one row alone, known from its metadata."""
    p = call.params
    if not (p.acts_in_prefill if phase == 0 else p.acts_in_decode):
        return Counter.BYPASS_PHASE
    if length > p.max_row_length:
        return Counter.BYPASS_MAX_ROW_LENGTH
    if offset < 0 or offset + length - 1 > torch.iinfo(call.topk.dtype).max:
        return Counter.BYPASS_BAD_OFFSET
    if p.needs_scores and length > 0 and (columns is None or start < 0 or start + length > columns):
        return Counter.BYPASS_NO_SCORES
    return None


def apply_into(call: PolicyCall) -> None:
    """Rewrite ``call.topk`` and add to ``call.counters``; see :func:`kvplugin.topology.op.apply_topology_policy`."""
    if call.params.mode is Mode.DISABLED:
        return
    rows, width = call.topk.shape
    topk, lengths = call.topk.tolist(), call.row_lengths.tolist()
    live = [True] * rows if call.row_live is None else call.row_live.tolist()
    phases = [1] * rows if call.row_phase is None else call.row_phase.tolist()
    offsets = [0] * rows if call.offsets is None else call.offsets.tolist()
    starts = [0] * rows if call.score_start is None else call.score_start.tolist()
    columns = None if call.scores is None else call.scores.shape[1]
    whole = call_bypass(call.params, rows)
    for row in range(rows):
        if not live[row] or lengths[row] < 0:
            continue
        counts = call.counters[0 if phases[row] == 0 else 1]
        counts[Counter.SEEN] += 1
        bypass = whole or row_bypass(lengths[row], offsets[row], starts[row], phases[row], columns, call)
        if bypass is not None:
            counts[bypass] += 1
            continue
        result = _apply_row(call, row, topk[row], lengths[row], offsets[row], starts[row])
        for counter, value in result.counts.items():
            counts[counter] += value
        if result.row is not None:
            call.topk[row] = torch.tensor(result.row + [-1] * (width - len(result.row)), dtype=call.topk.dtype)


class _RowResult(NamedTuple):
    row: list[int] | None
    counts: dict[Counter, int]


def _apply_row(call: PolicyCall, row: int, values: list[int], length: int, offset: int, start: int) -> _RowResult:
    p = call.params
    observe = p.mode is Mode.OBSERVE
    if length == 0:
        return _RowResult(None if observe else [], {Counter.IDENTITY: 1})
    learned: dict[int, None] = {}  # a set that keeps slot order
    bad: list[int] = []
    for value in values:
        token = value - offset
        if 0 <= token < length:
            if p.check_duplicates and token in learned:
                bad.append(value)
            learned[token] = None
        elif value != -1:
            bad.append(value)
    if bad and p.mismatch is MismatchAction.RAISE and call.error is not None and call.error[0] == 0:
        call.error.copy_(torch.tensor([row + 1, bad[0], offset, offset + length]))
    mismatch = bool(bad) and p.mismatch is not MismatchAction.DROP and p.mode is not Mode.ONLY
    score_of: dict[int, float] = {}
    if p.needs_scores and call.scores is not None:
        score_of = dict(zip(learned, call.scores[row, [start + token for token in learned]].tolist(), strict=True))
    chosen = select(
        list(learned),
        length,
        p,
        mismatch=mismatch,
        score_of=score_of,
        block_scores=None if call.witness_scores is None else call.witness_scores[row].tolist(),
    )
    counts = _count(set(learned), chosen, length, p)
    counts[Counter.INVALID] = len(bad)
    counts[Counter.RESCUED] = int(not learned)
    counts[Counter.FALLBACK] = int(mismatch)
    counts[Counter.EMPTY] = int(not (learned if observe else chosen.tokens))
    identity = not bad and set(learned) == set(chosen.tokens)
    counts[Counter.IDENTITY if identity else Counter.REWRITTEN] = 1
    return _RowResult(None if observe else [offset + token for token in chosen.tokens], counts)


def _count(learned: set[int], chosen: Selection, length: int, p: PolicyParams) -> dict[Counter, int]:
    selected, structure = set(chosen.tokens), chosen.structure
    kept = learned & selected
    injected = (structure.all & selected) - learned
    counts = {
        Counter.KEPT: len(kept),
        Counter.EVICTED: len(learned - selected),
        Counter.INJECTED: len(injected),
        Counter.BACKFILLED: len(selected - kept - injected),
    }
    for kind, hit, possible in (
        (structure.sink, Counter.SINK_HIT, Counter.SINK_POSSIBLE),
        (structure.local, Counter.LOCAL_HIT, Counter.LOCAL_POSSIBLE),
        (structure.witness, Counter.WITNESS_HIT, Counter.WITNESS_POSSIBLE),
    ):
        counts[hit], counts[possible] = len(kind & learned), len(kind)
    if p.witness is Witness.COVERAGE:
        counts[Counter.SEGMENTS] = len(segments(length, p))
        counts[Counter.SEGMENTS_EMPTY_BEFORE] = len(empty_segments(learned, length, p))
        counts[Counter.SEGMENTS_EMPTY_AFTER] = len(empty_segments(selected, length, p))
    return counts


def lift_into(call: LiftCall) -> None:
    """Lift ``call.scores``; see :func:`kvplugin.topology.op.lift_structural_scores`."""
    p = call.params
    rows, columns = call.scores.shape
    if not p.mode.merges or call_bypass(p, rows) is not None:
        return
    for row, length in enumerate(call.row_lengths.tolist()):
        start = 0 if call.score_start is None else int(call.score_start[row])
        decode = call.row_phase is None or int(call.row_phase[row]) != 0
        acts = p.acts_in_decode if decode else p.acts_in_prefill
        live = call.row_live is None or bool(call.row_live[row])
        own = {t: n for n, t in enumerate(t for t in range(length) if t // call.interleave % call.ranks == call.rank)}
        if live and acts and 0 < length <= p.max_row_length and start >= 0 and start + len(own) <= columns:
            for token in structure_of(length, p, None).all & own.keys():
                call.scores[row, start + own[token]] = math.inf
