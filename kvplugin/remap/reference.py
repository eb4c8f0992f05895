"""The remap in plain loops, obviously right. The oracle of every other implementation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from kvplugin.remap.call import INT32_MAX, ContextParallel, Member, RemapCall
from kvplugin.remap.counters import RemapCounter


class _Row(NamedTuple):
    """What one row reads: its request's blocks, or, of a prefill row, its workspace. None where it has no request."""

    blocks: Sequence[int] | None
    workspace_start: int | None
    is_prefill: bool


def remap_into(call: RemapCall) -> None:
    """Fill ``physical`` and ``valid``, add to ``counters``; see :func:`kvplugin.remap.op.remap_grouped`."""
    members = [Member(*member) for member in call.members.tolist()]
    for row, tokens in enumerate(call.topk.tolist()):
        source = _row(call, row)
        slots: list[list[int]] = []
        for token in tokens:
            found = _physical_rows(call, source, members, token)
            if isinstance(found, RemapCounter) and call.counters is not None:
                call.counters[row % len(call.counters), found] += 1
            slots.append(found if isinstance(found, list) else [-1] * len(members))
        valid = [slot for slot in slots if slot[0] >= 0]
        if call.compact:
            slots = valid + [[-1] * len(members)] * (len(slots) - len(valid))
        for g in range(len(members)):
            call.physical[g, row] = call.physical.new_tensor([slot[g] for slot in slots])
        if call.valid is not None:
            call.valid[row] = len(valid)


def _row(call: RemapCall, row: int) -> _Row:
    if call.workspace is not None and int(call.workspace.request_of_row[row]) >= 0:
        request, starts = int(call.workspace.request_of_row[row]), call.workspace.starts.tolist()
        return _Row(None, starts[request] if request < len(starts) else None, is_prefill=True)
    request = int(call.request_of_row[row])
    known = 0 <= request < len(call.block_table)
    return _Row(call.block_table[request].tolist() if known else None, None, is_prefill=False)


def _physical_rows(
    call: RemapCall, source: _Row, members: Sequence[Member], token: int
) -> list[int] | RemapCounter | None:
    """The physical row of one slot for each member, or the reason why there is none; None: nothing to count."""
    if token < 0:
        return None if token == -1 else RemapCounter.INVALID_TOKEN
    owner, local = _deal(token, call.context_parallel)
    if not source.is_prefill and owner != call.context_parallel.rank:
        return None
    if source.blocks is None and source.workspace_start is None:
        return RemapCounter.INVALID_REQUEST
    block, within = divmod(local, call.block_size)
    if block >= call.block_table.shape[1]:
        return RemapCounter.INVALID_BLOCK
    if call.workspace is not None and source.workspace_start is not None:
        rows = [owner * call.workspace.rank_stride + source.workspace_start + local] * len(members)
    else:
        assert source.blocks is not None
        page = source.blocks[block]
        if not 0 <= page < call.num_blocks:
            return RemapCounter.INVALID_PAGE
        rows = [page * member.stride_rows + member.row_offset + within for member in members]
    return rows if all(0 <= row <= INT32_MAX for row in rows) else RemapCounter.OVERFLOW


def _deal(token: int, context_parallel: ContextParallel) -> tuple[int, int]:
    """The rank that holds a token, and the token's number among those of that rank."""
    size, _, interleave = context_parallel
    group, within = divmod(token, interleave)
    return group % size, group // size * interleave + within
