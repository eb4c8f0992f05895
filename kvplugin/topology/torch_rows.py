"""What came in, as tensors: which rows the policy acts on, and their learned tokens in rank order."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.config import Eviction
from kvplugin.topology.call import LiftCall, PolicyCall
from kvplugin.topology.counters import Counter
from kvplugin.topology.torch_structure import TokenLists, comparable

Counts = dict[Counter, Tensor]
"""What each row adds to a counter: int64 or bool ``[T, 1]``."""

_LAST = torch.iinfo(torch.int64).max
"""Sort key of a slot without a valid token."""


class Rows(NamedTuple):
    """Metadata of the rows, ``[T, 1]`` each; where ``acts`` is false the others are 0."""

    acts: Tensor
    length: Tensor
    offset: Tensor
    start: Tensor


class Learned(NamedTuple):
    """Unique valid learned tokens, best first, and bool ``[T, K]``: the slots of ``topk`` that hold bad input."""

    ranked: TokenLists
    bad: Tensor


def rows_of(call: PolicyCall, rows: slice) -> PolicyCall:
    """The same call for some of its rows, on views of its tensors."""

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else tensor[rows]

    return call._replace(
        topk=call.topk[rows],
        row_lengths=call.row_lengths[rows],
        row_live=cut(call.row_live),
        row_phase=cut(call.row_phase),
        offsets=cut(call.offsets),
        scores=cut(call.scores),
        score_start=cut(call.score_start),
        witness_scores=cut(call.witness_scores),
    )


def acting_rows(call: PolicyCall | LiftCall) -> tuple[Tensor, Tensor]:
    """Rows that are live and rows whose phase the policy acts in, bool ``[T, 1]`` each."""
    p = call.params
    yes = torch.ones_like(call.row_lengths, dtype=torch.bool)
    live = yes if call.row_live is None else call.row_live
    decode = yes if call.row_phase is None else call.row_phase != 0
    in_phase = (decode & p.acts_in_decode) | (~decode & p.acts_in_prefill)
    return live.unsqueeze(1), in_phase.unsqueeze(1)


def column_of(call: PolicyCall | LiftCall, values: Tensor | None) -> Tensor:
    """Per-row integers as int64 ``[T, 1]``; None stands for zeros."""
    return (torch.zeros_like(call.row_lengths) if values is None else values).long().unsqueeze(1)


def admit(call: PolicyCall, whole: Counter | None) -> tuple[Rows, Counts]:
    """Sort out the rows to leave alone; ``whole`` is a reason that holds for all of them."""
    p = call.params
    length = column_of(call, call.row_lengths)
    offset, start = column_of(call, call.offsets), column_of(call, call.score_start)
    live, in_phase = acting_rows(call)
    columns = 0 if call.scores is None else call.scores.shape[1]
    # Rearranged so that no intermediate result leaves int64, whatever the row holds.
    beyond_dtype = offset - 1 > torch.iinfo(call.topk.dtype).max - length
    beyond_scores = (length > 0) & ((start < 0) | (start > columns - length))
    reasons = {
        Counter.BYPASS_PHASE: ~in_phase,
        Counter.BYPASS_MAX_ROW_LENGTH: length > p.max_row_length,
        Counter.BYPASS_BAD_OFFSET: (offset < 0) | beyond_dtype,
        Counter.BYPASS_NO_SCORES: beyond_scores & p.needs_scores,
    }
    left = live & (length >= 0)
    counts = {Counter.SEEN: left}
    for reason, holds in reasons.items() if whole is None else [(whole, left)]:
        counts[reason] = left & holds
        left = left & ~holds
    return Rows(left, *(torch.where(left, values, 0) for values in (length, offset, start))), counts


def learn(call: PolicyCall, rows: Rows) -> Learned:
    """Read the learned tokens of the rows that act; of a repeated one the first slot counts."""
    p = call.params
    values = call.topk.long()
    valid = (values >= rows.offset) & (values <= rows.offset + rows.length - 1)
    tokens = torch.where(valid, values - rows.offset, 0)
    keys, slots = torch.where(valid, _sort_keys(call, rows, tokens), _LAST).sort(dim=1, stable=True)
    repeated = torch.zeros_like(valid)
    repeated[:, 1:] = (keys[:, 1:] == keys[:, :-1]) & (keys[:, 1:] != _LAST)
    repeated_slot = torch.zeros_like(valid).scatter_(1, slots, repeated)
    bad = ~valid & (values != -1) & (rows.length > 0)
    if p.check_duplicates:
        bad |= repeated_slot
    if p.eviction is Eviction.INPUT_ORDER:
        return Learned(TokenLists(tokens, valid & ~repeated_slot), bad)
    return Learned(TokenLists(tokens.gather(1, slots), valid.gather(1, slots) & ~repeated), bad)


def _sort_keys(call: PolicyCall, rows: Rows, tokens: Tensor) -> Tensor:
    """Keys, int64 ``[T, K]``, that ascend in the order in which tokens keep their slots; equal tokens, equal keys.

    With scores the upper half of a key is the score and the lower half the token, so ``scores`` may have 2**32 columns.
    """
    if not call.params.needs_scores or call.scores is None or call.scores.shape[1] == 0:
        return -tokens
    column = torch.where(rows.length > 0, rows.start + tokens, 0)
    scores = comparable(call.scores.gather(1, column).float())
    bits = scores.view(torch.int32)
    # Read as integers, negative floats ascend in the wrong direction: flip all their bits but the sign.
    ascending = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((~ascending).long() << 32) | tokens


def record_error(call: PolicyCall, rows: Rows, bad: Tensor, first_row: int, error: Tensor) -> None:
    """Keep the first bad slot of the lowest bad row, unless an earlier one is recorded."""
    # index_select, because indexing with a tensor reads it on the host.
    row = bad.any(1).int().argmax().view(1)
    slot = bad.index_select(0, row).int().argmax(1, keepdim=True)
    value = call.topk.index_select(0, row).gather(1, slot)
    low = rows.offset.index_select(0, row)
    high = low + rows.length.index_select(0, row)
    found = torch.cat([(row + first_row + 1).unsqueeze(1), value, low, high], 1).squeeze(0)
    error.copy_(torch.where((error[0] == 0) & bad.any(), found, error))
