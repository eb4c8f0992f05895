"""The remap of one row: resolve it to (page, position within the page), then write it once per member.

A row of healthy and unused slots, as nearly all are, is resolved by a loop without branches; any other row slot by
slot, which also counts.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplugin.remap import counters as counters_module
from kvplugin.remap.call import INT32_MAX
from kvplugin.remap.counters import RemapCounter
from kvplugin.topology.numba_args import IntArray, Matrix
from kvplugin.topology.numba_jit import entry, fetch_add, inlined, kernel, source_stamp
from kvplugin.topology.numba_read import row_values

_ROWS_AT_ONCE = 4  # few enough that threads finish together, many enough that they rarely meet at the cursor
_NOTHING = -1  # a slot without a row and without a fault; a fault is the negative number -2 - reason


class Plan(NamedTuple):
    """The call's plain numbers, as the fields of a record.

    Attributes:
        shift: log2 of ``block_size``, or -1 where that is no power of two or context parallel deals tokens out.
    """

    width: int
    requests: int
    blocks: int
    block_size: int
    shift: int
    num_blocks: int
    size: int
    rank: int
    interleave: int
    rank_stride: int
    compact: bool
    has_workspace: bool


class Cube(NamedTuple):
    """A three-dimensional tensor of any layout, as a flat array with strides."""

    data: NDArray[np.int32]
    member_stride: int
    row_stride: int
    slot_stride: int


class RemapBatch(NamedTuple):
    """One call, as the threads that work on it share it.

    Python passes it as a plain tuple, which numba takes over in 2 microseconds less.

    Attributes:
        cursor: int64 ``[1]``, the first row that no thread has taken yet.
        plans: one record, with the fields of :class:`Plan`.
        prefills, starts: of the prefill workspace; empty where there is none.
        valid: int32 ``[T]``, healthy slots of each row.
        counts: int64 ``[S, len(RemapCounter)]`` of this call; S = 0 where nobody counts.
    """

    cursor: NDArray[np.int64]
    plans: NDArray[np.void]
    topk: Matrix
    requests: NDArray[np.int64]
    table: Matrix
    members: NDArray[np.int64]
    prefills: NDArray[np.int32]
    starts: NDArray[np.int32]
    physical: Cube
    valid: NDArray[np.int32]
    counts: NDArray[np.int64]


class RowScratch(NamedTuple):
    """Scratch of one thread for rows of K slots.

    Attributes:
        pages, within: page of each slot, or -1, and the position within it; int32 ``[K]``.
        spare: the row itself where its slots lie apart; the index dtype, ``[K]``.
    """

    pages: NDArray[np.int32]
    within: NDArray[np.int32]
    spare: IntArray


@inlined
def _deal(token: np.int64, plan: Plan) -> tuple[np.int64 | int, np.int64]:
    """The rank that holds a token, and the token's number among those of that rank."""
    if plan.size == 1:
        return 0, token
    group = token // plan.interleave
    return group % plan.size, group // plan.size * plan.interleave + token % plan.interleave


@inlined
def _fits(page: np.integer[Any] | int, within: np.integer[Any] | int, members: NDArray[np.int64]) -> bool:
    for g in range(members.shape[0]):  # noqa: SIM110 - numba compiles no generator of this kind
        if page * members[g, 0] + members[g, 1] + within > INT32_MAX:
            return False
    return True


@kernel
def _resolve(
    token: np.int64,
    request: np.int64,
    prefill: np.int64,
    plan: Plan,
    table: Matrix,
    members: NDArray[np.int64],
    starts: NDArray[np.int32],
) -> tuple[np.int64 | int, np.int64 | int]:
    """Page and position within it of one slot; of a prefill row, its workspace row as the page. Or a fault, 0."""
    if token < 0:
        return _NOTHING if token == -1 else -2 - RemapCounter.INVALID_TOKEN.value, 0
    owner, local = _deal(token, plan)
    if prefill < 0 and owner != plan.rank:
        return _NOTHING, 0
    known = prefill < starts.size if prefill >= 0 else 0 <= request < plan.requests
    if not known:
        return -2 - RemapCounter.INVALID_REQUEST.value, 0
    block, within = local // plan.block_size, local % plan.block_size
    if block >= plan.blocks:
        return -2 - RemapCounter.INVALID_BLOCK.value, 0
    if prefill >= 0:
        row = owner * plan.rank_stride + starts[prefill] + local
        return row if 0 <= row <= INT32_MAX else -2 - RemapCounter.OVERFLOW.value, 0
    page = np.int64(table.data[np.uintp(request * table.row_stride + block * table.column_stride)])
    if page < 0 or page >= plan.num_blocks:
        return -2 - RemapCounter.INVALID_PAGE.value, 0
    return page if _fits(page, within, members) else -2 - RemapCounter.OVERFLOW.value, within


@kernel
def _resolve_clean(
    values: IntArray,
    request_at: int,
    plan: Plan,
    table: Matrix,
    members: NDArray[np.int64],
    pages: NDArray[np.int32],
    within: NDArray[np.int32],
) -> np.int64:
    """Resolve a row whose slots are all healthy or unused and return how many are healthy; -1 for any other row.

    The loops are free of branches, and narrow, so that the compiler can vectorise what it may: all but the one that
    reads the table.
    """
    kind = values.dtype.type
    shift, mask, blocks = kind(plan.shift), kind(plan.block_size - 1), kind(min(plan.blocks, INT32_MAX))
    num_blocks = np.int32(plan.num_blocks)
    unused = np.int32(0)
    for j in range(values.size):
        block = kind(values[j] >> shift)
        pages[j] = np.int32(block) if (values[j] >= 0) & (block < blocks) else np.int32(_NOTHING)
        within[j] = np.int32(values[j] & mask)
        unused = np.int32(unused + np.int32(values[j] == -1))
    for j in range(values.size):
        page = table.data[np.uintp(request_at + max(pages[j], np.int32(0)) * table.column_stride)]
        pages[j] = np.int32(min(max(page, -1), INT32_MAX)) if pages[j] >= 0 else np.int32(_NOTHING)
    found, highest = np.int32(0), np.int32(0)
    for j in range(values.size):
        found = np.int32(found + np.int32((pages[j] >= 0) & (pages[j] < num_blocks)))
        highest = max(highest, pages[j])
    clean = found + unused == values.size and _fits(highest, mask, members)
    return np.int64(found if clean else -1)


@inlined
def _resolve_each(
    row: int,
    request: np.int64,
    prefill: np.int64,
    plan: Plan,
    topk: Matrix,
    table: Matrix,
    members: NDArray[np.int64],
    starts: NDArray[np.int32],
    pages: NDArray[np.int32],
    within: NDArray[np.int32],
    counts: NDArray[np.int64],
) -> np.int64:
    """Resolve any row, count its faults, and return how many slots are healthy."""
    found = np.int64(0)
    for j in range(plan.width):
        token = np.int64(topk.data[np.uintp(row * topk.row_stride + j * topk.column_stride)])
        page, position = _resolve(token, request, prefill, plan, table, members, starts)
        if page < _NOTHING:
            if counts.shape[0] > 0:
                fetch_add(counts[row % counts.shape[0], -2 - page :], 1)
            page = _NOTHING
        pages[j], within[j] = page, position
        found += page >= 0
    return found


@inlined
def _compact(pages: NDArray[np.int32], within: NDArray[np.int32]) -> None:
    count = 0
    for j in range(pages.size):
        if pages[j] >= 0:
            pages[count], within[count] = pages[j], within[j]
            count += 1
    pages[count:] = _NOTHING


@inlined
def _write(
    physical: Cube,
    at: int,
    pages: NDArray[np.int32],
    within: NDArray[np.int32],
    stride_rows: np.int32,
    row_offset: np.int32,
) -> None:
    """Write one member's row. What is not -1 is known to fit, so the arithmetic stays in 32 bits."""
    for j in range(pages.size):
        row = np.int32(pages[j] * stride_rows + row_offset + within[j])
        physical.data[np.uintp(at + j * physical.slot_stride)] = row if pages[j] >= 0 else -1


@inlined
def new_scratch(batch: RemapBatch) -> RowScratch:
    """Allocate what :func:`remap_row` needs, for all rows of a thread."""
    width = batch.plans[0].width
    return RowScratch(np.empty(width, np.int32), np.empty(width, np.int32), np.empty(width, batch.topk.data.dtype))


@kernel
def remap_row(row: int, batch: RemapBatch, scratch: RowScratch) -> None:
    """Translate one row for all members and note how many of its slots are healthy."""
    plan, topk, table, members = batch.plans[0], batch.topk, batch.table, batch.members
    pages, within = scratch.pages, scratch.within
    request, prefill, found = batch.requests[row], np.int64(-1), np.int64(-1)
    if plan.has_workspace:
        prefill = np.int64(batch.prefills[row])
    # One block at least, so that slots without a token may read the first.
    if plan.shift >= 0 and prefill < 0 and 0 <= request < plan.requests and plan.blocks > 0:
        values = row_values(topk, row, plan.width, scratch.spare)
        found = _resolve_clean(values, request * table.row_stride, plan, table, members, pages, within)
    if found < 0:
        found = _resolve_each(
            row, request, prefill, plan, topk, table, members, batch.starts, pages, within, batch.counts
        )
    batch.valid[row] = found
    if plan.compact and found < plan.width:
        _compact(pages, within)
    for g in range(members.shape[0]):
        at = g * batch.physical.member_stride + row * batch.physical.row_stride
        stride_rows, row_offset = members[g, 0], members[g, 1]
        if prefill >= 0:
            stride_rows, row_offset = 1, 0
        _write(batch.physical, at, pages, within, np.int32(stride_rows), np.int32(row_offset))


def remap_stamp() -> int:
    """A checksum of everything that is compiled into :func:`remap_row`; see :func:`source_stamp`."""
    stamp = source_stamp()
    for path in (__file__, counters_module.__file__):
        stamp = zlib.crc32(Path(path).read_bytes(), stamp)
    return stamp


def _entry(stamp: int) -> Callable[..., int]:
    """Compile the kernel that Python calls. It returns the stamp, which thereby belongs to its cache key."""

    @entry
    def remap_rows(parts: tuple[Any, ...]) -> int:
        batch = RemapBatch(*parts)
        rows, scratch = batch.requests.size, new_scratch(batch)
        first = fetch_add(batch.cursor, _ROWS_AT_ONCE)
        while first < rows:
            for row in range(first, min(first + _ROWS_AT_ONCE, rows)):
                remap_row(row, batch, scratch)
            first = fetch_add(batch.cursor, _ROWS_AT_ONCE)
        return stamp

    return remap_rows


remap_rows = _entry(remap_stamp())
