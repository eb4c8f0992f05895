"""The policy on GPUs: one program per row, in place, without host synchronisation or allocation, safe to capture.

Policies, the switch and the rows' arms are read from device memory, so that all of them can change while a captured
graph goes on replaying. :mod:`kvplugin.topology.triton_row` says how a row is decided.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplugin.kernels.variant import KernelVariant
from kvplugin.topology.call import ArmsCall, LiftArmsCall, LiftCall, PolicyCall
from kvplugin.topology.table import table_of
from kvplugin.topology.triton_admit import (
    ACTS,
    LEFT_ALONE,
    MAX_ROW_LENGTH,
    POLICY_COLUMNS,
    add_counts,
    bypass_counts,
    call_state,
    in_phase,
    is_live,
    merges,
    phase_and_arm,
    row_state,
)
from kvplugin.topology.triton_plan import CHECK_DUPLICATES, MISMATCH, MODE, OBSERVE, RAISE, plan_row
from kvplugin.topology.triton_result import (
    changing_slots,
    count_gaps,
    count_row,
    count_tile,
    read_tile,
    record_error,
    renewed_slots,
)
from kvplugin.topology.triton_structure import block_witnesses, structural_token, structure_size, windows

WIDEST_TILE = 4096
"""Slots one program holds in registers; a wider row is read again in every pass."""
TOKENS_PER_LIFT = 128
REGISTERS, MOST_REGISTERS = 65536, 255
"""Of a multiprocessor, and at most of a thread."""
UNSPECIALIZED = (
    "rows",
    "width",
    "scores_row_stride",
    "columns",
    "block_scores_row_stride",
    "blocks",
    "arms",
    "stripes",
    "highest_index",
)
"""Numbers that batches change: a kernel of their own for 1, or for multiples of 16, would be compiled while serving."""
COVERAGE_SEGMENTS = 64
"""Segments of the variants that are compiled ahead of time for `coverage`."""


@triton.jit
def row_metadata(r, row_lengths, offsets, score_start):
    """Length, offset and first score column of a row, int64."""
    length = tl.load(row_lengths + r).to(tl.int64)
    low, start = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if offsets is not None:
        low = tl.load(offsets + r).to(tl.int64)
    if score_start is not None:
        start = tl.load(score_start + r).to(tl.int64)
    return length, low, start


@triton.jit
def decide(
    r,
    row,
    policy,
    scores,
    block_scores,
    counters,
    error,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    HAS_BLOCK_SCORES: tl.constexpr,
):
    """Plan a row, count it, and record bad input; ``counters`` is what :func:`add_counts` needs.

    Returns:
        The plan, the row's first tile, and how many slots stay.
    """
    plan, tile, census = plan_row(
        row, policy, scores, block_scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES, HAS_BLOCK_SCORES
    )
    if error is not None:
        if (census[2] > 0) & (tl.load(policy + MISMATCH) == RAISE):
            record_error(error, r, row, BLOCK)
    staying, kept, known = count_tile(tile, plan)
    if not ONE_TILE:
        for first in range(BLOCK, row[2], BLOCK):
            more = count_tile(read_tile(row, first, plan, policy, scores, LISTED, BLOCK, HAS_SCORES), plan)
            staying += more[0]
            kept += more[1]
            known += more[2]
    gaps = count_gaps(tile, row, plan, policy, scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES)
    counts = count_row(census, (staying, kept, known), gaps, row, plan, policy, LISTED)
    pointer, stripes, arms, arm, phase = counters
    add_counts(pointer, r, stripes, arms, arm, phase, counts)
    return plan, tile, staying


@triton.jit
def _store_row(
    tile,
    staying,
    row,
    plan,
    policy,
    scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """Store the slots that change; ``staying`` of them do not."""
    pointer, stride, width = row[0], row[1], row[2]
    if ONE_TILE:
        new, changes = renewed_slots(tile, 0, 0, row, plan, LISTED, BLOCK)
        tl.store(pointer + tl.arange(0, BLOCK) * stride, new, mask=changes)
    else:
        # From the last tile to the first: what tells repeated tokens apart stands in earlier slots.
        taken = width - staying
        for back in range(0, width, BLOCK):
            first = ((width - 1) // BLOCK) * BLOCK - back
            again = read_tile(row, first, plan, policy, scores, LISTED, BLOCK, HAS_SCORES)
            taken -= changing_slots(again, first, row, plan, BLOCK)
            new, changes = renewed_slots(again, first, taken, row, plan, LISTED, BLOCK)
            tl.store(pointer + (first + tl.arange(0, BLOCK)) * stride, new, mask=changes)


@triton.jit(do_not_specialize=UNSPECIALIZED)
def policy_kernel(
    topk,
    topk_row_stride,
    topk_slot_stride,
    rows,
    width,
    row_lengths,
    row_live,
    row_phase,
    row_arm,
    offsets,
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
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
    HAS_BLOCK_SCORES: tl.constexpr,
):
    """Rewrite row ``program_id(0)``; ``scores`` and ``block_scores`` are any pointer where there are none."""
    r = tl.program_id(0)
    length, low, start = row_metadata(r, row_lengths, offsets, score_start)
    if is_live(r, length, row_live, enabled):
        phase, arm, known = phase_and_arm(r, row_phase, row_arm, arms)
        policy = policies + arm.to(tl.int64) * POLICY_COLUMNS
        state = row_state(policy, known, phase, length, low, start, rows, width, columns, highest_index, HAS_SCORES)
        if state == ACTS:
            row = (
                topk + r.to(tl.int64) * topk_row_stride,
                topk_slot_stride,
                width,
                low,
                length.to(tl.int32),
                tl.load(policy + CHECK_DUPLICATES),
            )
            score_row = scores + (r.to(tl.int64) * scores_row_stride + start * scores_column_stride)
            row_scores = (score_row, scores_column_stride)
            row_block_scores = (block_scores + r.to(tl.int64) * block_scores_row_stride, blocks)
            plan, tile, staying = decide(
                r,
                row,
                policy,
                row_scores,
                row_block_scores,
                (counters, stripes, arms, arm, phase),
                error,
                LISTED,
                BLOCK,
                ONE_TILE,
                HAS_SCORES,
                HAS_BLOCK_SCORES,
            )
            if tl.load(policy + MODE) != OBSERVE:
                _store_row(tile, staying, row, plan, policy, row_scores, LISTED, BLOCK, ONE_TILE, HAS_SCORES)
        elif state != LEFT_ALONE:
            add_counts(counters, r, stripes, arms, arm, phase, bypass_counts(state))


@triton.jit(do_not_specialize=["scores_row_stride", "columns", "rows", "width", "arms"])
def lift_kernel(
    scores,
    scores_row_stride,
    scores_column_stride,
    columns,
    rows,
    width,
    row_lengths,
    row_live,
    row_phase,
    row_arm,
    score_start,
    policies,
    arms,
    enabled,
    BLOCK: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    INTERLEAVE: tl.constexpr,
):
    """Raise the structural scores of row ``program_id(0)`` to +inf, as far as this rank has them."""
    r = tl.program_id(0)
    length, _, start = row_metadata(r, row_lengths, None, score_start)
    if is_live(r, length, row_live, enabled) == 0:
        return
    phase, arm, known = phase_and_arm(r, row_phase, row_arm, arms)
    policy = policies + arm.to(tl.int64) * POLICY_COLUMNS
    acts = known & merges(tl.load(policy + MODE)) & in_phase(policy, phase)
    acts &= (call_state(policy, rows, width) == ACTS) & (length <= tl.load(policy + MAX_ROW_LENGTH))
    PERIOD: tl.constexpr = RANKS * INTERLEAVE
    own = length
    if RANKS > 1:
        rest = tl.minimum(tl.maximum(length % PERIOD - RANK * INTERLEAVE, 0), INTERLEAVE)
        own = length // PERIOD * INTERLEAVE + rest
    acts &= (start >= 0) & (start <= columns - own)
    if acts == 0:
        return
    tokens = length.to(tl.int32)
    sinks, local_start = windows(policy, tokens)
    witnesses = block_witnesses(policy, tokens, sinks, local_start, scores, 0, 1, False)
    structure = (sinks, local_start, witnesses)
    size = structure_size(structure, tokens, 0, 1)
    pointer = scores + (r.to(tl.int64) * scores_row_stride + start * scores_column_stride)
    for first in range(0, size, BLOCK):
        rank = first + tl.arange(0, BLOCK)
        token = structural_token(rank, structure, tokens, 0, 1)
        mask = rank < size
        if RANKS > 1:
            mask &= token // INTERLEAVE % RANKS == RANK
            token = token // PERIOD * INTERLEAVE + token % INTERLEAVE
        tl.store(pointer + token.to(tl.int64) * scores_column_stride, float("inf"), mask=mask)


def launch_shape(width: int, listed_witnesses: int) -> dict[str, Any]:
    """Compile-time settings for rows of ``width`` slots: short rows take fewer warps, wide ones several tiles."""
    block = min(max(triton.next_power_of_2(width), 32), WIDEST_TILE)
    # Lists take registers; eight warps would spill some at a tile of 2048.
    most_warps = 16 if listed_witnesses and block < WIDEST_TILE else 8
    warps = min(max(block // (128 if listed_witnesses else 256), 1), most_warps)
    # Left alone, ptxas spills a few values where that lets one more program onto a multiprocessor.
    registers = min(MOST_REGISTERS, REGISTERS // (32 * warps))
    return {"BLOCK": block, "ONE_TILE": width <= block, "num_warps": warps, "maxnreg": registers}


def listed_entries(listed_witnesses: int) -> int:
    """Entries of a kernel's list of witnesses: one more than there can be, so that the last is free."""
    return int(triton.next_power_of_2(listed_witnesses + 1))


def policy_arguments(call: ArmsCall) -> tuple[Any, ...]:
    """Run-time arguments of :func:`policy_kernel`."""
    scores = call.topk if call.scores is None else call.scores
    block_scores = call.topk if call.witness_scores is None else call.witness_scores.contiguous()
    return (
        call.topk,
        *call.topk.stride(),
        *call.topk.shape,
        *(_flat(call.row_lengths), _flat(call.row_live), _flat(call.row_phase), _flat(call.row_arm)),
        _flat(call.offsets),
        scores,
        *scores.stride(),
        scores.shape[1],
        _flat(call.score_start),
        block_scores,
        block_scores.stride(0),
        block_scores.shape[1],
        call.policies,
        len(call.policies),
        call.enabled,
        call.counters,
        len(call.counters),
        call.error,
        torch.iinfo(call.topk.dtype).max,
    )


def policy_settings(call: ArmsCall) -> dict[str, Any]:
    """Compile-time arguments of :func:`policy_kernel`, and its warps."""
    return {
        "LISTED": listed_entries(call.listed_witnesses),
        "HAS_SCORES": call.scores is not None,
        "HAS_BLOCK_SCORES": call.witness_scores is not None,
        **launch_shape(call.topk.shape[1], call.listed_witnesses),
    }


def _flat(values: Tensor | None) -> Tensor | None:
    """Per-row values side by side, as kernels read them; copied only where they are not."""
    return None if values is None else values.contiguous()


def spans_too_far(topk: Tensor) -> bool:
    """Whether a row's slots lie too far apart for the kernel, which counts within a row in 32 bits: over 8 GiB."""
    return bool((topk.shape[1] - 1) * abs(topk.stride(1)) > torch.iinfo(torch.int32).max)


def apply_arms_into(call: ArmsCall) -> None:
    """Rewrite ``call.topk`` and add to ``call.counters``; see :func:`kvplugin.topology.op.apply_topology_policy`."""
    if spans_too_far(call.topk):
        near = call._replace(topk=call.topk.contiguous())
        apply_arms_into(near)
        call.topk.copy_(near.topk)
    elif len(call.topk):
        with torch.cuda.device_of(call.topk):
            policy_kernel[(len(call.topk),)](*policy_arguments(call), **policy_settings(call))


def lift_arms_into(call: LiftArmsCall) -> None:
    """Lift ``call.scores``; see :func:`kvplugin.topology.op.lift_structural_scores`."""
    rows, columns = call.scores.shape
    if rows == 0:
        return
    with torch.cuda.device_of(call.scores):
        lift_kernel[(rows,)](
            call.scores,
            *call.scores.stride(),
            columns,
            rows,
            call.width,
            *(_flat(call.row_lengths), _flat(call.row_live), _flat(call.row_phase), _flat(call.row_arm)),
            _flat(call.score_start),
            call.policies,
            len(call.policies),
            call.enabled,
            BLOCK=TOKENS_PER_LIFT,
            RANKS=call.ranks,
            RANK=call.rank,
            INTERLEAVE=call.interleave,
            num_warps=1,
        )


def apply_into(call: PolicyCall) -> None:
    """The same for one policy."""
    table = table_of(call.params, call.topk.device)
    given = {name: value for name, value in call._asdict().items() if name not in ("params", "counters")}
    apply_arms_into(
        ArmsCall(
            **given,
            row_arm=None,
            policies=table.rows,
            enabled=table.enabled,
            listed_witnesses=table.listed_witnesses,
            counters=call.counters[None, None],
        )
    )


def lift_into(call: LiftCall) -> None:
    """The same for one policy."""
    table = table_of(call.params, call.scores.device)
    given = {name: value for name, value in call._asdict().items() if name != "params"}
    lift_arms_into(
        LiftArmsCall(**given, row_arm=None, policies=table.rows, enabled=table.enabled, width=call.params.width)
    )


ROW_POINTERS = {
    "row_lengths": "*i32",
    "row_live": "*i1",
    "row_phase": "*i8",
    "row_arm": "*i32",
    "policies": "*i64",
    "enabled": "*i32",
}
LIFT_FIXED: dict[str, object] = {"scores_column_stride": 1, "score_start": None}
LIFT_SETTINGS: dict[str, object] = {"BLOCK": TOKENS_PER_LIFT, "RANKS": 1, "RANK": 0, "INTERLEAVE": 1}
POLICY_FIXED: dict[str, object] = {
    "topk_slot_stride": 1,
    "scores_column_stride": 1,
    "offsets": None,
    "score_start": None,
    "error": None,
}


def signature_of(kernel: Any, pointers: dict[str, str], fixed: dict[str, object]) -> dict[str, str]:
    """Types of a kernel's run-time arguments, to compile it ahead of time: pointers as given, 32-bit numbers else."""
    return {name: pointers.get(name, "i32") for name in kernel.arg_names if name not in fixed and not name.isupper()}


def policy_pointers(score_type: str | None) -> dict[str, str]:
    """Types of the policy kernel's pointers."""
    rows = {"topk": "*i32", "scores": f"*{score_type or 'i32'}", "block_scores": "*i32"}
    return {**rows, "counters": "*i64", **ROW_POINTERS}


def policy_constexprs(width: int, score_type: str | None, listed: int) -> dict[str, Any]:
    """What :func:`policy_settings` says of such a call."""
    shape = launch_shape(width, listed)
    scored = {"HAS_SCORES": score_type is not None, "HAS_BLOCK_SCORES": False}
    return {"LISTED": listed_entries(listed), **scored, **shape}


def variants() -> list[KernelVariant]:
    """Specialisations that a serving engine compiles, to be compiled ahead of time."""
    lift = signature_of(lift_kernel, {"scores": "*fp32", **ROW_POINTERS}, LIFT_FIXED)
    return [
        _policy_variant(2048, "fp32", 0),
        _policy_variant(2048, "bf16", 0),
        _policy_variant(2048, None, 0),
        _policy_variant(2048, "fp32", COVERAGE_SEGMENTS),
        _policy_variant(2176, "fp32", 0),
        _policy_variant(2176, "fp32", COVERAGE_SEGMENTS),
        _policy_variant(8192, "fp32", 0),
        KernelVariant("lift_fp32", lift_kernel, lift, {**LIFT_FIXED, **LIFT_SETTINGS}, num_warps=1),
    ]


def _policy_variant(width: int, score_type: str | None, listed: int) -> KernelVariant:
    settings = policy_constexprs(width, score_type, listed)
    warps, registers = settings.pop("num_warps"), settings.pop("maxnreg")
    name = f"policy_{score_type or 'unscored'}_k{width}_{'coverage' if listed else 'uniform'}"
    signature = signature_of(policy_kernel, policy_pointers(score_type), POLICY_FIXED)
    return KernelVariant(name, policy_kernel, signature, {**POLICY_FIXED, **settings}, warps, registers)
