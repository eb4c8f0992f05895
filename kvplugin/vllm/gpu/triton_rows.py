"""One launch that says of every row of a batch which request it belongs to, where it stands, and whether it is live."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplugin.kernels.variant import KernelVariant

ROWS_PER_PROGRAM = 128


@triton.jit(do_not_specialize=["requests", "capacity", "slots", "search_steps"])
def fill_rows_kernel(
    query_start,
    lengths,
    prompts,
    arms,
    prefixes,
    keys,
    requests,
    slots,
    search_steps,
    capacity,
    live_out,
    phase_out,
    arm_out,
    prefix_out,
    request_out,
    length_out,
    ONE_EACH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Fill rows ``[0, capacity)``.

    ``slots`` = 0: rows lie side by side, request after request. Otherwise row ``b * slots + j`` is query ``j`` of
    request ``b``, and live where the request has so many. ``ONE_EACH`` (with ``slots`` = 1): each request has one
    query, as in the later steps of a draft, and ``query_start`` is not read.
    """
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < capacity
    if slots > 0:
        request = row // slots
        query = row % slots
    else:
        # The last request that begins at or before the row; requests without queries begin where the next one does.
        low = tl.zeros([BLOCK], tl.int32)
        high = tl.zeros([BLOCK], tl.int32) + requests
        for _ in range(search_steps):
            middle = (low + high + 1) // 2
            begins = tl.load(query_start + middle) <= row
            low = tl.where(begins, middle, low)
            high = tl.where(begins, high, middle - 1)
        request = low
        query = row - tl.load(query_start + request)
    known = inside & (request < requests)
    if ONE_EACH:
        count = tl.zeros([BLOCK], tl.int32) + 1
    else:
        count = tl.load(query_start + request + 1, mask=known, other=0)
        count -= tl.load(query_start + request, mask=known, other=0)
    length = tl.load(lengths + request, mask=known, other=0)
    live = known & (query < count) & (length > 0)
    position = length - count + query
    prompt = tl.load(prompts + request, mask=known, other=0)
    tl.store(live_out + row, live, mask=inside)
    tl.store(phase_out + row, (position >= prompt).to(tl.int8), mask=inside)
    tl.store(arm_out + row, tl.load(arms + request, mask=known, other=0), mask=inside)
    tl.store(prefix_out + row, tl.load(prefixes + request, mask=known, other=0), mask=inside)
    tl.store(request_out + row, tl.load(keys + request, mask=known, other=0), mask=inside)
    # The padded layout counts back from the most queries that a request has, whatever this one has.
    visible = tl.where(slots > 0, tl.maximum(length - slots + query + 1, 0), position + 1)
    tl.store(length_out + row, tl.where(live, visible, 0), mask=inside)


def variants() -> list[KernelVariant]:
    """Both ways in which an engine fills its rows."""
    numbers = dict.fromkeys(("requests", "slots", "search_steps", "capacity"), "i32")
    columns = ("query_start", "lengths", "prompts", "arms", "prefixes", "keys")
    filled = ("arm_out", "prefix_out", "request_out", "length_out")
    signature = {**dict.fromkeys((*columns, *filled), "*i32"), "live_out": "*i1", "phase_out": "*i8", **numbers}
    return [
        KernelVariant(name, fill_rows_kernel, signature, {"ONE_EACH": one_each, "BLOCK": ROWS_PER_PROGRAM}, num_warps=4)
        for name, one_each in (("rows", False), ("rows_one_each", True))
    ]
