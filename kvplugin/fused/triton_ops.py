"""The fused form on GPUs: one launch per index group, one program per row.

A program rewrites its row in place and then reads it again to translate it: 8 KiB that its multiprocessor's first-level
cache still holds. Holding both steps' values in registers at once instead would spill them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvplugin.fused import separate
from kvplugin.fused.call import FusedCall
from kvplugin.kernels.variant import KernelVariant
from kvplugin.remap.triton_ops import launch_for, remap_kernel
from kvplugin.topology.triton_ops import (
    POLICY_FIXED,
    UNSPECIALIZED,
    policy_arguments,
    policy_constexprs,
    policy_kernel,
    policy_pointers,
    policy_settings,
    signature_of,
    spans_too_far,
)


@triton.jit(do_not_specialize=[*UNSPECIALIZED, "requests", "table_blocks", "num_blocks", "remap_stripes"])
def fused_kernel(
    topk,
    topk_row_stride,
    topk_slot_stride,
    rows,
    width,
    row_lengths,
    row_live,
    row_phase,
    row_arm,
    scores,
    scores_row_stride,
    scores_column_stride,
    columns,
    score_start,
    block_scores,
    block_scores_row_stride,
    blocks,
    policies,
    arms,
    enabled,
    counters,
    stripes,
    error,
    highest_index,
    request_ptr,
    table_ptr,
    members_ptr,
    physical_ptr,
    valid_ptr,
    remap_counters_ptr,
    requests,
    table_blocks,
    num_blocks,
    remap_stripes,
    request_stride,
    table_row,
    table_block,
    physical_member,
    physical_row_stride,
    physical_slot,
    valid_stride,
    remap_counters_stripe,
    remap_counters_reason,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    HAS_BLOCK_SCORES: tl.constexpr,
    WIDTH: tl.constexpr,
    MEMBERS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Rewrite and translate row ``program_id(0)``; arguments as of the two kernels it is made of."""
    policy_kernel(
        topk,
        topk_row_stride,
        topk_slot_stride,
        rows,
        width,
        row_lengths,
        row_live,
        row_phase,
        row_arm,
        None,
        scores,
        scores_row_stride,
        scores_column_stride,
        columns,
        score_start,
        block_scores,
        block_scores_row_stride,
        blocks,
        policies,
        arms,
        enabled,
        counters,
        stripes,
        error,
        highest_index,
        LISTED,
        BLOCK,
        ONE_TILE,
        HAS_SCORES,
        HAS_BLOCK_SCORES,
    )
    # Every thread's stores to the row come before any thread's loads from it.
    tl.debug_barrier()
    remap_kernel(
        topk,
        request_ptr,
        table_ptr,
        members_ptr,
        physical_ptr,
        valid_ptr,
        remap_counters_ptr,
        None,
        None,
        requests,
        table_blocks,
        num_blocks,
        0,
        0,
        remap_stripes,
        topk_row_stride,
        topk_slot_stride,
        request_stride,
        table_row,
        table_block,
        physical_member,
        physical_row_stride,
        physical_slot,
        valid_stride,
        remap_counters_stripe,
        remap_counters_reason,
        0,
        0,
        WIDTH,
        MEMBERS,
        BLOCK_SIZE,
        False,
        1,
        0,
        1,
        TILE,
        TILES,
    )


def fused_into(call: FusedCall) -> None:
    """Rewrite the rows and translate them; see :func:`kvplugin.fused.op.apply_and_remap`."""
    policy, remap = call
    if spans_too_far(policy.topk):
        separate.fused_into(call)
        return
    rows, width = policy.topk.shape
    members = len(remap.members)
    settings = policy_settings(policy)
    launch = launch_for(rows, width, whole_rows=True)
    given = policy_arguments(policy)
    counters_strides = (0, 0) if remap.counters is None else remap.counters.stride()
    with torch.cuda.device_of(policy.topk):
        fused_kernel[(rows,)](
            *given[:OFFSETS],
            *given[OFFSETS + 1 :],
            remap.request_of_row,
            remap.block_table,
            remap.members,
            remap.physical,
            remap.valid,
            remap.counters,
            *remap.block_table.shape,
            remap.num_blocks,
            1 if remap.counters is None else len(remap.counters),
            *remap.request_of_row.stride(),
            *remap.block_table.stride(),
            *remap.physical.stride(),
            0 if remap.valid is None else remap.valid.stride(0),
            *counters_strides,
            WIDTH=width,
            MEMBERS=members,
            BLOCK_SIZE=remap.block_size,
            TILE=launch.tile,
            TILES=launch.tiles,
            **settings,
        )


OFFSETS = policy_kernel.arg_names.index("offsets")
"""Position of an argument that this form does not have: its rows hold logical indices."""


def variants() -> list[KernelVariant]:
    """Specialisations that a serving engine compiles, to be compiled ahead of time: decode steps."""
    return [_variant(2048, 1), _variant(2048, 4), _variant(2176, 4)]


def _variant(width: int, members: int) -> KernelVariant:
    settings = policy_constexprs(width, "fp32", 0)
    warps, registers = settings.pop("num_warps"), settings.pop("maxnreg")
    launch = launch_for(1, width, whole_rows=True)
    pointers = {"request_ptr": "*i32", "table_ptr": "*i32", "members_ptr": "*i64", "physical_ptr": "*i32"}
    pointers |= {"valid_ptr": "*i32", "remap_counters_ptr": "*i64", **policy_pointers("fp32")}
    fixed: dict[str, object] = {name: value for name, value in POLICY_FIXED.items() if name != "offsets"}
    for stride in ("request_stride", "table_block", "physical_slot", "valid_stride", "remap_counters_reason"):
        fixed[stride] = 1
    remap = {"WIDTH": width, "MEMBERS": members, "BLOCK_SIZE": 64, "TILE": launch.tile, "TILES": launch.tiles}
    signature = signature_of(fused_kernel, pointers, fixed)
    constexprs = {**fixed, **settings, **remap}
    name = f"fused_fp32_k{width}_g{members}"
    return KernelVariant(name, fused_kernel, signature, constexprs, warps, registers)
