"""The remap in vectorised torch: any device, no host synchronisation, usable inside a captured CUDA graph.

Shapes never depend on values. What does not count stays inside bounds and is sent to a spare column. Long batches are
cut into chunks of rows, so scratch memory has a bound.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.remap.call import INT32_MAX, RemapCall
from kvplugin.remap.counters import RemapCounter

CHUNK_IN_CACHE, CHUNK_ON_GPU = 2**18, 2**23
"""Physical rows (members x rows x width) worked on at once: few enough for a CPU's cache, or enough to fill a GPU.

Scratch is about 50 bytes each.
"""


class _Tokens(NamedTuple):
    """Where the tokens of a batch live: int64 ``[T, K]`` each, and bool ``[T, K]`` that says which entries count.

    Attributes:
        owner: context-parallel rank.
        local: number of the token among those of its rank.
        wanted: the slot holds a token that this call must translate.
    """

    owner: Tensor
    local: Tensor
    wanted: Tensor


class _Sieve:
    """Which slots are still good, and, where counters want it, which ones each reason removed."""

    def __init__(self, good: Tensor, *, counting: bool) -> None:
        self.good = good
        self._removed: dict[RemapCounter, Tensor] | None = {} if counting else None

    def keep(self, condition: Tensor, otherwise: RemapCounter) -> None:
        """Remove the slots that do not satisfy ``condition``, broadcastable bool."""
        kept = self.good & condition
        self.note(self.good, kept, otherwise)
        self.good = kept

    def note(self, before: Tensor, after: Tensor, reason: RemapCounter) -> None:
        """Note that a reason removed the slots that are in ``before``, bool ``[T, K]``, and not in ``after``."""
        if self._removed is not None:
            self._removed[reason] = before & ~after

    def add_to(self, counters: Tensor, first_row: int) -> None:
        """Add what was removed to int64 ``[S, len(RemapCounter)]``; the first row of this batch is ``first_row``."""
        assert self._removed is not None
        removed = torch.stack([self._removed[reason].sum(1) for reason in RemapCounter], 1)
        stripe = torch.arange(first_row, first_row + len(removed), device=counters.device) % len(counters)
        counters.index_add_(0, stripe, removed)


def remap_into(call: RemapCall) -> None:
    """Fill ``physical`` and ``valid``, add to ``counters``; see :func:`kvplugin.remap.op.remap_grouped`."""
    members, rows, width = call.physical.shape
    chunk = max(1, (CHUNK_IN_CACHE if call.topk.is_cpu else CHUNK_ON_GPU) // (members * width))
    for first in range(0, rows, chunk):
        _remap_rows(_rows_of(call, slice(first, first + chunk)), first)


def _rows_of(call: RemapCall, rows: slice) -> RemapCall:
    workspace = call.workspace
    return call._replace(
        topk=call.topk[rows],
        request_of_row=call.request_of_row[rows],
        workspace=workspace and workspace._replace(request_of_row=workspace.request_of_row[rows]),
        physical=call.physical[:, rows],
        valid=None if call.valid is None else call.valid[rows],
    )


def _remap_rows(call: RemapCall, first_row: int) -> None:
    prefill = None if call.workspace is None else call.workspace.request_of_row.long().unsqueeze(1)
    tokens = _deal(call, prefill)
    sieve = _Sieve(tokens.wanted, counting=call.counters is not None)
    sieve.note(call.topk < 0, call.topk == -1, RemapCounter.INVALID_TOKEN)
    request = call.request_of_row.long().unsqueeze(1)
    known = (request >= 0) & (request < call.block_table.shape[0])
    if prefill is not None and call.workspace is not None:
        known = torch.where(prefill >= 0, prefill < call.workspace.starts.shape[0], known)
    sieve.keep(known, RemapCounter.INVALID_REQUEST)
    block = tokens.local // call.block_size
    sieve.keep(block < call.block_table.shape[1], RemapCounter.INVALID_BLOCK)
    page = _pages(call, request, block, sieve.good)
    in_pool = (page >= 0) & (page < call.num_blocks)
    sieve.keep(in_pool if prefill is None else in_pool | (prefill >= 0), RemapCounter.INVALID_PAGE)
    stride_rows, row_offset = call.members.view(-1, 1, 1, 2).unbind(-1)
    physical = page * stride_rows + row_offset + (tokens.local - block * call.block_size)
    if prefill is not None:
        physical = torch.where(prefill >= 0, _workspace_rows(call, prefill, tokens, sieve.good), physical)
    sieve.keep(((physical >= 0) & (physical <= INT32_MAX)).all(0), RemapCounter.OVERFLOW)
    physical = torch.where(sieve.good, physical, -1).int()
    call.physical.copy_(_to_the_front(physical, sieve.good) if call.compact else physical)
    if call.valid is not None:
        call.valid.copy_(sieve.good.sum(1))
    if call.counters is not None:
        sieve.add_to(call.counters, first_row)


def _deal(call: RemapCall, prefill: Tensor | None) -> _Tokens:
    """Deal the tokens out to their ranks; slots without a token stand at token 0."""
    size, rank, interleave = call.context_parallel
    token = call.topk.long().clamp(min=0)
    if size == 1:
        return _Tokens(torch.zeros_like(token), token, call.topk >= 0)
    group = token // interleave
    owner, local = group % size, group // size * interleave + token % interleave
    mine = owner == rank if prefill is None else (owner == rank) | (prefill >= 0)
    return _Tokens(owner, local, (call.topk >= 0) & mine)


def _pages(call: RemapCall, request: Tensor, block: Tensor, good: Tensor) -> Tensor:
    """The table's entries, int64 ``[T, K]``; -1 where the table must not be read."""
    requests, blocks = call.block_table.shape
    if requests * blocks == 0:
        return torch.full_like(block, -1)
    inside = good & (request >= 0) & (request < requests)
    entry = call.block_table[torch.where(inside, request, 0), torch.where(inside, block, 0)]
    page = torch.where(inside, entry.long(), -1)
    return torch.where(page < call.num_blocks, page, -1)


def _workspace_rows(call: RemapCall, prefill: Tensor, tokens: _Tokens, good: Tensor) -> Tensor:
    """Rows of the gathered workspace, int64 ``[T, K]``; arbitrary where a row is not a good prefill row."""
    workspace = call.workspace
    if workspace is None or workspace.starts.shape[0] == 0:
        return torch.zeros_like(tokens.local)
    start = workspace.starts[prefill.clamp(0, workspace.starts.shape[0] - 1)].long()
    return torch.where(good, tokens.owner * workspace.rank_stride + start + tokens.local, 0)


def _to_the_front(physical: Tensor, good: Tensor) -> Tensor:
    """Move the good entries of each row, bool ``[T, K]``, to the front, for each member: int32 ``[G, T, K]``."""
    members, rows, width = physical.shape
    slot = torch.where(good, good.cumsum(1) - 1, width)
    placed = torch.full((members, rows, width + 1), -1, dtype=torch.int32, device=physical.device)
    return placed.scatter_(2, slot.expand(members, -1, -1), physical)[..., :width]
