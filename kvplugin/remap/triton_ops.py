"""The remap on a GPU: one launch for all members, each table entry loaded once per slot.

Two launch shapes. A call of few rows is split over column tiles, so that one decode row keeps many multiprocessors
busy. A call of many rows, or one that needs a row's count, gives each row one program, which walks the row in tiles.
The grid depends on shapes alone, and every other value is read on the device, so a captured graph may be replayed.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kvplugin.kernels.variant import KernelVariant
from kvplugin.remap.call import NO_CONTEXT_PARALLEL, ContextParallel, RemapCall
from kvplugin.remap.counters import RemapCounter

SPLIT_ROWS = 256
"""Up to this many rows, about two programs per multiprocessor of a large GPU, splitting rows is what fills it."""

SPLIT_TILE = 256
WIDEST_TILE = 4096
SLOTS_PER_WARP = 256
"""Eight slots a thread: more would spill registers where rows are compacted for several members."""

_INT32_MAX = tl.constexpr(2**31 - 1)
_INVALID_TOKEN = tl.constexpr(RemapCounter.INVALID_TOKEN.value)
_INVALID_REQUEST = tl.constexpr(RemapCounter.INVALID_REQUEST.value)
_INVALID_BLOCK = tl.constexpr(RemapCounter.INVALID_BLOCK.value)
_INVALID_PAGE = tl.constexpr(RemapCounter.INVALID_PAGE.value)
_OVERFLOW = tl.constexpr(RemapCounter.OVERFLOW.value)


@triton.jit
def page_base(token, wanted, table_row_ptr, table_stride, blocks, block_size, num_blocks):
    """Pool block that holds each token, int64, or -1: not wanted, beyond the table's row, or no block of the pool.

    ``token`` is at least 0 where ``wanted``; the row that ``table_row_ptr`` points to is read for those alone.
    """
    block = token // block_size
    inside = wanted & (block < blocks)
    base = tl.load(table_row_ptr + block.to(tl.int64) * table_stride, mask=inside, other=-1).to(tl.int64)
    return tl.where((base >= 0) & (base < num_blocks), base, -1)


@triton.jit
def physical_row(base, token, block_size, stride_rows, row_offset):
    """Row of a member's pool, int64; ``base`` is from :func:`page_base`, stride and offset are int64."""
    return base * stride_rows + row_offset + (token % block_size).to(tl.int64)


@triton.jit
def fits_int32(row):
    """Whether a row can be stored."""
    return (row >= 0) & (row <= _INT32_MAX)


@triton.jit
def fits_all_members(base, token, block_size, members_ptr, MEMBERS: tl.constexpr):
    """Whether the physical row of each member fits int32."""
    fits = base >= 0
    for member in tl.static_range(MEMBERS):
        stride_rows, row_offset = tl.load(members_ptr + 2 * member), tl.load(members_ptr + 2 * member + 1)
        fits &= fits_int32(physical_row(base, token, block_size, stride_rows, row_offset))
    return fits


@triton.jit
def owner_of(token, SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Context-parallel rank that holds each token."""
    return (token // INTERLEAVE) % SIZE


@triton.jit
def local_token(token, SIZE: tl.constexpr, INTERLEAVE: tl.constexpr):
    """Number of each token among those of its rank."""
    return (token // (SIZE * INTERLEAVE)) * INTERLEAVE + token % INTERLEAVE


@triton.jit
def row_source(
    row, request_ptr, request_stride, requests, prefill_ptr, prefill_stride, prefills, starts_ptr, starts_stride
):
    """Where a row finds its tokens: is there such a place, is it the paged pool, its request, its first workspace row.

    The request is 0 where it must not be used.
    """
    request = tl.load(request_ptr + row * request_stride).to(tl.int64)
    known = (request >= 0) & (request < requests)
    paged = row >= 0  # always
    start = tl.full((), 0, tl.int64)
    if prefill_ptr is not None:
        prefill = tl.load(prefill_ptr + row * prefill_stride).to(tl.int64)
        paged = prefill < 0
        known = tl.where(paged, known, prefill < prefills)
        start = tl.load(starts_ptr + prefill * starts_stride, mask=known & (prefill >= 0), other=0).to(tl.int64)
    return known, paged, tl.where(known & paged, request, 0), start


@triton.jit
def add_count(counters_ptr, counters_stride, reason: tl.constexpr, slots, applies):
    """Add the number of marked slots to one counter where a whole-row condition holds."""
    count = tl.where(applies, tl.sum(slots.to(tl.int32), 0), 0)
    tl.atomic_add(counters_ptr + reason * counters_stride, count.to(tl.int64), mask=count > 0, sem="relaxed")


@triton.jit
def count_faults(counters_ptr, counters_stride, token, wanted, inside, base, good, known, paged):
    """Count the slots without a row by their reasons; a healthy tile pays for one sum."""
    faults = (token < -1) | (wanted & (good == 0))
    if tl.sum(faults.to(tl.int32), 0) > 0:
        resolved = tl.where(paged, base, 0) >= 0
        add_count(counters_ptr, counters_stride, _INVALID_TOKEN, token < -1, True)
        add_count(counters_ptr, counters_stride, _INVALID_REQUEST, wanted, known == 0)
        add_count(counters_ptr, counters_stride, _INVALID_BLOCK, wanted & (inside == 0), known)
        add_count(counters_ptr, counters_stride, _INVALID_PAGE, inside & (resolved == 0), paged)
        add_count(counters_ptr, counters_stride, _OVERFLOW, inside & resolved & (good == 0), True)


@triton.jit
def fill_tail(
    row_ptr, member_stride, slot_stride, first, WIDTH: tl.constexpr, MEMBERS: tl.constexpr, TILE: tl.constexpr
):
    """Store -1 in the slots of a row from ``first`` on, for each member."""
    for tile in range(tl.cdiv(WIDTH, TILE)):
        slot = tile * TILE + tl.arange(0, TILE)
        slot_ptr = row_ptr + slot.to(tl.int64) * slot_stride
        for _member in tl.static_range(MEMBERS):
            tl.store(slot_ptr, -1, mask=(slot >= first) & (slot < WIDTH))
            slot_ptr += member_stride


@triton.jit(do_not_specialize=["requests", "blocks", "num_blocks", "prefills", "rank_stride", "stripes"])
def remap_kernel(
    topk_ptr,  # int32 or int64 [T, WIDTH]
    request_ptr,  # int32 or int64 [T]
    table_ptr,  # int32 or int64 [requests, blocks]
    members_ptr,  # int64 [MEMBERS, 2], contiguous: stride_rows, row_offset
    physical_ptr,  # int32 [MEMBERS, T, WIDTH]
    valid_ptr,  # int32 [T], or None: nobody counts
    counters_ptr,  # int64 [stripes, reasons], or None
    prefill_ptr,  # int32 [T], or None: no workspace
    starts_ptr,  # int32 [prefills], or None
    requests,
    blocks,
    num_blocks,
    prefills,
    rank_stride,
    stripes,
    topk_row,  # strides, in elements
    topk_slot,
    request_stride,
    table_row,
    table_block,
    physical_member,
    physical_row_stride,
    physical_slot,
    valid_stride,
    counters_stripe,
    counters_reason,
    prefill_stride,
    starts_stride,
    WIDTH: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    COMPACT: tl.constexpr,
    CP_SIZE: tl.constexpr,
    CP_RANK: tl.constexpr,
    CP_INTERLEAVE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,  # per program: 1 where a row is split, else the whole row
):
    """Remap one row, or one tile of it. Whole-row conditions become bounds: masks are made of per-slot values alone."""
    row = tl.program_id(0).to(tl.int64)
    known, paged, request, start = row_source(
        row, request_ptr, request_stride, requests, prefill_ptr, prefill_stride, prefills, starts_ptr, starts_stride
    )
    known_blocks = tl.where(known, blocks, 0)
    paged_blocks = tl.where(paged, known_blocks, 0)
    table_row_ptr = table_ptr + request * table_row
    topk_row_ptr = topk_ptr + row * topk_row
    out_row_ptr = physical_ptr + row * physical_row_stride
    found = tl.full((), 0, tl.int32)
    for tile in range(TILES):
        slot = (tl.program_id(1) + tile) * TILE + tl.arange(0, TILE)
        in_row = slot < WIDTH
        slot = slot.to(tl.int64)
        token = tl.load(topk_row_ptr + slot * topk_slot, mask=in_row, other=-1)
        owner = owner_of(token, CP_SIZE, CP_INTERLEAVE)
        local = local_token(token, CP_SIZE, CP_INTERLEAVE)
        wanted = (token >= 0) & (tl.where(paged, owner, CP_RANK) == CP_RANK)
        inside = wanted & (local // BLOCK_SIZE < known_blocks)
        base = page_base(local, wanted, table_row_ptr, table_block, paged_blocks, BLOCK_SIZE, num_blocks)
        good = fits_all_members(base, local, BLOCK_SIZE, members_ptr, MEMBERS)
        gathered = owner.to(tl.int64) * rank_stride + start + local.to(tl.int64)
        if prefill_ptr is not None:
            good |= inside & fits_int32(tl.where(paged, -1, gathered))
        if counters_ptr is not None:
            stripe_ptr = counters_ptr + (row % stripes) * counters_stripe
            count_faults(stripe_ptr, counters_reason, token, wanted, inside, base, good, known, paged)
        stored = in_row
        if COMPACT:
            slot = (found + tl.cumsum(good.to(tl.int32), 0) - 1).to(tl.int64)
            stored = good
        slot_ptr = out_row_ptr + slot * physical_slot
        for member in tl.static_range(MEMBERS):
            stride_rows, row_offset = tl.load(members_ptr + 2 * member), tl.load(members_ptr + 2 * member + 1)
            result = physical_row(base, local, BLOCK_SIZE, stride_rows, row_offset)
            if prefill_ptr is not None:
                result = tl.where(paged, result, gathered)
            tl.store(slot_ptr, tl.where(good, result, -1).to(tl.int32), mask=stored)
            slot_ptr += physical_member
        if valid_ptr is not None:
            found += tl.sum(good.to(tl.int32), 0)
    if valid_ptr is not None:
        tl.store(valid_ptr + row * valid_stride, found)
    if COMPACT:
        fill_tail(out_row_ptr, physical_member, physical_slot, found, WIDTH, MEMBERS, TILE)


class Launch(NamedTuple):
    """How the slots of a call are spread: programs per row, tiles that each walks, slots per tile, warps."""

    programs_per_row: int
    tiles: int
    tile: int
    warps: int


def launch_for(rows: int, width: int, *, whole_rows: bool) -> Launch:
    """The launch shape of a call; ``whole_rows`` where a count or a compaction needs each row in one program."""
    if rows <= SPLIT_ROWS and not whole_rows:
        tile = min(triton.next_power_of_2(width), SPLIT_TILE)
        return Launch(triton.cdiv(width, tile), 1, tile, 4)
    tile = min(triton.next_power_of_2(width), WIDEST_TILE)
    return Launch(1, triton.cdiv(width, tile), tile, max(4, tile // SLOTS_PER_WARP))


def remap_into(call: RemapCall) -> None:
    """Fill ``physical`` and ``valid``, add to ``counters``; see :func:`kvplugin.remap.op.remap_grouped`."""
    members, rows, width = call.physical.shape
    launch = launch_for(rows, width, whole_rows=call.valid is not None)
    prefill_rows, starts, rank_stride = (None, None, 0) if call.workspace is None else call.workspace
    counters_strides = (0, 0) if call.counters is None else call.counters.stride()
    with torch.cuda.device_of(call.topk):
        remap_kernel[rows, launch.programs_per_row](
            call.topk,
            call.request_of_row,
            call.block_table,
            call.members,
            call.physical,
            call.valid,
            call.counters,
            prefill_rows,
            starts,
            *call.block_table.shape,
            call.num_blocks,
            0 if starts is None else starts.shape[0],
            rank_stride,
            1 if call.counters is None else call.counters.shape[0],
            *call.topk.stride(),
            *call.request_of_row.stride(),
            *call.block_table.stride(),
            *call.physical.stride(),
            0 if call.valid is None else call.valid.stride(0),
            *counters_strides,
            0 if prefill_rows is None else prefill_rows.stride(0),
            0 if starts is None else starts.stride(0),
            WIDTH=width,
            MEMBERS=members,
            BLOCK_SIZE=call.block_size,
            COMPACT=call.compact,
            CP_SIZE=call.context_parallel.size,
            CP_RANK=call.context_parallel.rank,
            CP_INTERLEAVE=call.context_parallel.interleave,
            TILE=launch.tile,
            TILES=launch.tiles,
            num_warps=launch.warps,
        )


class _Options(NamedTuple):
    """What a variant of the kernel is asked for beside the rows themselves."""

    counting: bool = False
    compact: bool = False
    counters: bool = False
    workspace: bool = False
    context_parallel: ContextParallel = NO_CONTEXT_PARALLEL


_OPTIONS = {
    "plain": _Options(),
    "count": _Options(counting=True, counters=True),
    "compact": _Options(counting=True, compact=True),
    "context_parallel": _Options(True, compact=True, counters=True, context_parallel=ContextParallel(4, 1, 16)),
    "workspace": _Options(True, counters=True, workspace=True),
    "workspace_context_parallel": _Options(workspace=True, context_parallel=ContextParallel(2, 0)),
}
_VARIANTS = (
    ("plain", 1, 2048, 1),
    ("plain", 1, 2176, 4),
    ("plain", 16384, 2048, 4),
    ("count", 16384, 2048, 4),
    ("compact", 16384, 2048, 1),
    ("compact", 16384, 2176, 4),
    ("context_parallel", 16384, 2048, 4),
    ("context_parallel", 16384, 8192, 4),
    ("workspace", 16384, 2048, 4),
    ("workspace_context_parallel", 1, 2048, 4),
)
"""Options, rows, width and members: each option, launch shape and width at least once, and where registers are many."""

_UNIT_STRIDES = ("topk_slot", "request_stride", "table_block", "physical_slot", "valid_stride", "counters_reason")


def variants() -> list[KernelVariant]:
    """Specialisations that a serving engine compiles, to be compiled ahead of time: decode steps and prefill chunks."""
    return [_variant(*given) for given in _VARIANTS]


def _variant(kind: str, rows: int, width: int, members: int) -> KernelVariant:
    options = _OPTIONS[kind]
    launch = launch_for(rows, width, whole_rows=options.counting)
    given = dict.fromkeys(("topk_ptr", "request_ptr", "table_ptr", "physical_ptr"), "*i32") | {"members_ptr": "*i64"}
    if options.counting:
        given["valid_ptr"] = "*i32"
    if options.counters:
        given["counters_ptr"] = "*i64"
    if options.workspace:
        given |= {"prefill_ptr": "*i32", "starts_ptr": "*i32"}
    size, rank, interleave = options.context_parallel
    absent = {name for name in remap_kernel.arg_names if name.endswith("_ptr")} - given.keys()
    constexprs: dict[str, object] = {
        **dict.fromkeys(absent),
        **dict.fromkeys(_UNIT_STRIDES, 1),
        "WIDTH": width,
        "MEMBERS": members,
        "BLOCK_SIZE": 64,
        "COMPACT": options.compact,
        "CP_SIZE": size,
        "CP_RANK": rank,
        "CP_INTERLEAVE": interleave,
        "TILE": launch.tile,
        "TILES": launch.tiles,
    }
    numbers = {name: "i32" for name in remap_kernel.arg_names if name not in given.keys() | constexprs}
    shape = "split" if launch.programs_per_row > 1 else "row"
    return KernelVariant(
        f"remap_{kind}_{shape}_k{width}_g{members}", remap_kernel, given | numbers, constexprs, launch.warps
    )
