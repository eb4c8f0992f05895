"""The policy in vectorised torch: any device, no host synchronisation, usable inside a captured CUDA graph.

How a batch of rows becomes selections without a data-dependent shape:

1. *Admit.* Rows that are dead or bypassed become rows of length 0: every later step finds them empty, and the last one
   leaves their bytes alone.
2. *Rank.* One sort puts each row's learned tokens in the order in which they keep their slots. The sort key ends with
   the token, so repetitions stand side by side and ties have one order.
3. *Choose.* Structure has a closed form (:mod:`kvplugin.topology.torch_structure`): its size says how many learned
   tokens may stay, and a prefix sum over the ranked row says which.
4. *Backfill.* Slots still free go to the newest unselected tokens. Selected and backfilled tokens are at most K
   together, so the backfilled ones lie among the newest K tokens of the row, however long it is: a bitmap of width K
   finds them.
5. *Pack.* A prefix sum over all chosen tokens gives each its slot.

Entries that do not count stay inside bounds and are sent to a spare column. Long batches are cut into chunks of rows,
so scratch memory has a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.config import Eviction, Fill, MismatchAction, Mode, Witness
from kvplugin.topology.call import LiftCall, PolicyCall
from kvplugin.topology.counters import Counter
from kvplugin.topology.params import PolicyParams
from kvplugin.topology.reference import call_bypass
from kvplugin.topology.torch_rows import (
    Counts,
    Learned,
    Rows,
    acting_rows,
    admit,
    column_of,
    learn,
    record_error,
    rows_of,
)
from kvplugin.topology.torch_structure import NO_TOKEN, Kinds, Segments, Structure, TokenLists, join, structure_of

CHUNK_SLOTS = 2**21
"""Slots (rows x width) worked on at once: about 200 MiB of scratch."""

_INFINITY_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.bfloat16: (torch.int16, 0x7F80),
    torch.float16: (torch.int16, 0x7C00),
}


class _Choice(NamedTuple):
    """The selection of each row in disjoint parts; ``learned`` without structural tokens."""

    structural: TokenLists
    learned: TokenLists
    backfilled: TokenLists

    @property
    def size(self) -> Tensor:
        """Selected tokens: int64 ``[T, 1]``."""
        return self.structural.size + self.learned.size + self.backfilled.size


def apply_into(call: PolicyCall) -> None:
    """Rewrite ``call.topk`` and add to ``call.counters``; see :func:`kvplugin.topology.op.apply_topology_policy`."""
    if call.params.mode is Mode.DISABLED:
        return
    rows, width = call.topk.shape
    bypass = call_bypass(call.params, rows)
    chunk = max(1, CHUNK_SLOTS // width)
    for first in range(0, rows, chunk):
        part = rows_of(call, slice(first, first + chunk))
        admitted, counts = admit(part, bypass)
        if bypass is None:
            counts |= _apply_rows(part, admitted, first)
        _add_counts(part, counts)


def _apply_rows(call: PolicyCall, rows: Rows, first_row: int) -> Counts:
    """Rewrite the rows that act; ``first_row`` is the row of the whole call with which this chunk begins."""
    p = call.params
    learned = learn(call, rows)
    if p.mismatch is MismatchAction.RAISE and call.error is not None:
        record_error(call, rows, learned.bad, first_row, call.error)
    falls_back = learned.bad.any(1, keepdim=True) & (p.mismatch is not MismatchAction.DROP and p.mode is not Mode.ONLY)
    # A row that falls back gets the structure of an empty row: none. Everything else about it is as usual.
    structure = structure_of(torch.where(falls_back, 0, rows.length), p, call.witness_scores)
    if p.witness is Witness.COVERAGE:
        structure = _with_gaps(structure, learned.ranked, p)
    kinds = structure.kinds(learned.ranked.tokens)
    choice = _choose(learned.ranked, structure.enumerate(p), kinds, rows.length, p)
    if p.mode is not Mode.OBSERVE:
        packed = _pack(choice, p.width, rows.offset).to(call.topk.dtype)
        call.topk.copy_(torch.where(rows.acts, packed, call.topk))
    return (
        {Counter.FALLBACK: falls_back}
        | _count_structure(structure, kinds, learned.ranked, p)
        | _count_selection(learned, kinds, choice, rows, p)
    )


def _choose(learned: TokenLists, structural: TokenLists, kinds: Kinds, length: Tensor, p: PolicyParams) -> _Choice:
    """Fill ``min(K, L)`` slots of each row.

    Args:
        learned: best first; ``kinds`` says which of them are structural.
        structural: the whole structure of each row.
        length: int64 ``[T, 1]``.
    """
    budget = length.clamp(max=p.width)
    others = learned.where(~kinds.any)
    if p.mode is Mode.ONLY:
        others = others.first(0)
    elif p.eviction is Eviction.NONE:
        structural = _into_free_slots(structural, learned, budget - learned.size)
    else:
        others = others.first(budget - structural.size)
    free = 0 if p.fill is Fill.NONE else budget - structural.size - others.size
    return _Choice(structural, others, _newest_unselected([structural, others], length, p.width).first(free))


def _into_free_slots(structural: TokenLists, learned: TokenLists, free: Tensor) -> TokenLists:
    """The structural tokens that were learned, and the newest ``free`` of those that were not."""
    ascending = torch.where(structural.mask, structural.tokens, NO_TOKEN).sort(1).values
    ascending = torch.nn.functional.pad(ascending, (0, 1), value=NO_TOKEN)
    spare = ascending.shape[1] - 1
    place = torch.searchsorted(ascending, learned.tokens.contiguous())
    hit = learned.mask & (ascending.gather(1, place) == learned.tokens)
    known = torch.zeros_like(ascending, dtype=torch.bool).scatter_(1, torch.where(hit, place, spare), True)
    newest = TokenLists(ascending.flip(1), (ascending < NO_TOKEN).flip(1))
    known = known.flip(1)
    return newest.where(known | newest.where(~known).first(free).mask)


def _newest_unselected(selected: Sequence[TokenLists], length: Tensor, width: int) -> TokenLists:
    """Those of the newest ``width`` tokens of each row that are not selected, newest first."""
    taken = torch.zeros(len(length), width + 1, dtype=torch.bool, device=length.device)
    for part in selected:
        age = length - 1 - part.tokens
        taken.scatter_(1, torch.where(part.mask & (age < width), age, width), True)
    ages = torch.arange(width, device=length.device)
    return TokenLists(length - 1 - ages, ~taken[:, :width] & (ages < length))


def _pack(choice: _Choice, width: int, offset: Tensor) -> Tensor:
    """Absolute indices, int64 ``[T, K]``: the selected tokens, then -1."""
    packed = torch.full((len(offset), width + 1), -1, device=offset.device)
    last = torch.full_like(offset, -1)
    for part in choice:
        slot = torch.where(part.mask, last + part.mask.cumsum(1, dtype=torch.int32), width)
        packed.scatter_(1, slot, part.tokens + offset)
        last = last + part.size
    return packed[:, :width]


def _with_gaps(structure: Structure, learned: TokenLists, p: PolicyParams) -> Structure:
    """Coverage: the last token of each segment without a window token or one of the best learned becomes a witness."""
    occupied, length = structure.enumerate(p), structure.length
    if p.mode is not Mode.ONLY:
        others = learned.where(~structure.kinds(learned.tokens).any)
        occupied = join(occupied, others.first(p.width - p.segments - occupied.size))
        length = torch.where(length > p.width, length, 0)  # shorter rows are selected whole
    segments = Segments.of(length, p)
    gaps = torch.where(segments.without(occupied), segments.end - 1, NO_TOKEN)
    return structure._replace(runs=gaps.sort(1).values, span=1)


def _count_structure(structure: Structure, kinds: Kinds, learned: TokenLists, p: PolicyParams) -> Counts:
    sinks, local = structure.sinks, structure.length - torch.maximum(structure.local_start, structure.sinks)
    local = local.clamp(min=0)
    return {
        Counter.SINK_HIT: learned.where(kinds.sink).size,
        Counter.SINK_POSSIBLE: sinks,
        Counter.LOCAL_HIT: learned.where(kinds.local).size,
        Counter.LOCAL_POSSIBLE: local,
        Counter.WITNESS_HIT: learned.where(kinds.witness).size,
        Counter.WITNESS_POSSIBLE: structure.enumerate(p).size - sinks - local,
    }


def _count_selection(learned: Learned, kinds: Kinds, choice: _Choice, rows: Rows, p: PolicyParams) -> Counts:
    known = learned.ranked
    # In topology_only a learned token can be selected without being chosen as such: by the window grown backwards.
    window = torch.where(choice.backfilled.mask, choice.backfilled.tokens, NO_TOKEN).amin(1, keepdim=True)
    kept = known.where(kinds.any | choice.learned.mask | (known.tokens >= window)).size
    injected = choice.structural.size - known.where(kinds.any).size
    invalid = learned.bad.sum(1, keepdim=True)
    identity = (invalid == 0) & (kept == known.size) & (kept == choice.size)
    unlearned = (known.size == 0) & (rows.length > 0)
    counts = {
        Counter.IDENTITY: rows.acts & identity,
        Counter.REWRITTEN: rows.acts & ~identity,
        Counter.RESCUED: unlearned,
        Counter.EMPTY: unlearned if p.mode is Mode.OBSERVE else (choice.size == 0) & (rows.length > 0),
        Counter.KEPT: kept,
        Counter.EVICTED: known.size - kept,
        Counter.INJECTED: injected,
        Counter.BACKFILLED: choice.size - kept - injected,
        Counter.INVALID: invalid,
    }
    if p.witness is Witness.COVERAGE:
        segments = Segments.of(rows.length, p)
        counts[Counter.SEGMENTS] = segments.exist.sum(1, keepdim=True)
        counts[Counter.SEGMENTS_EMPTY_BEFORE] = segments.without(known).sum(1, keepdim=True)
        counts[Counter.SEGMENTS_EMPTY_AFTER] = segments.without(join(*choice)).sum(1, keepdim=True)
    return counts


def _add_counts(call: PolicyCall, counts: Counts) -> None:
    """Add what each row counts to the counters of its phase."""
    none = torch.zeros_like(call.row_lengths, dtype=torch.int64).unsqueeze(1)
    table = torch.cat([counts.get(counter, none).long() for counter in Counter], 1)
    decode = torch.ones_like(call.row_lengths) if call.row_phase is None else (call.row_phase != 0)
    call.counters.index_add_(0, decode.long(), table)


def lift_into(call: LiftCall) -> None:
    """Lift ``call.scores``; see :func:`kvplugin.topology.op.lift_structural_scores`."""
    p = call.params
    rows, columns = call.scores.shape
    if not p.mode.merges or columns == 0 or call_bypass(p, rows) is not None:
        return
    length, start = column_of(call, call.row_lengths), column_of(call, call.score_start)
    live, in_phase = acting_rows(call)
    period, skipped = call.ranks * call.interleave, call.rank * call.interleave
    own = length // period * call.interleave + (length % period - skipped).clamp(0, call.interleave)
    visible = (length > 0) & (length <= p.max_row_length) & (start >= 0) & (start <= columns - own)
    structural = structure_of(torch.where(live & in_phase & visible, length, 0), p, None).enumerate(p)
    tokens = structural.tokens
    mask = structural.mask & (tokens // call.interleave % call.ranks == call.rank)
    place = tokens // period * call.interleave + tokens % call.interleave
    column = torch.nn.functional.pad(torch.where(mask, start + place, -1), (0, 1), value=-1)
    # Entries that stand for no token repeat one that does; a row without any writes back what it holds.
    anchor = column.amax(1, keepdim=True)
    column = torch.where(column < 0, anchor, column).clamp(min=0)
    # Through integers: a scatter of half-precision values on the CPU rewrites other columns, and with them NaN bits.
    bits, infinity = _INFINITY_BITS[call.scores.dtype]
    scores = call.scores.view(bits)
    scores.scatter_(1, column, torch.where(anchor >= 0, infinity, scores.gather(1, column)))
