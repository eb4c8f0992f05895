"""The signals on GPUs: one program per row, without host synchronisation or allocation, safe to capture.

A program leaves at once when its row is not sampled. Where there is a memory there are two launches: the first compares
rows with it, the second changes it. Sets lie in it in ascending order, so that a token finds its equal by halving: with
K = 2048 that is 12 gathers from a cache, where a comparison of all pairs would take four million.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kvplugin.kernels.variant import KernelVariant
from kvplugin.topology.signals.call import SignalCall
from kvplugin.topology.signals.counters import BOUNDS, COLUMNS_PER_SIGNAL, UNIT, Signal, SignalColumn
from kvplugin.topology.triton_admit import (
    DISABLED,
    MAX_ROW_LENGTH,
    POLICY_COLUMNS,
    in_phase,
    is_live,
    merges,
    phase_and_arm,
)
from kvplugin.topology.triton_ops import (
    MOST_REGISTERS,
    REGISTERS,
    ROW_POINTERS,
    row_metadata,
    signature_of,
    spans_too_far,
)
from kvplugin.topology.triton_plan import MODE, OBSERVE
from kvplugin.topology.triton_row import (
    EVICTION,
    NOTHING_LEAVES,
    candidates,
    eviction_cut,
    eviction_keys,
    read_slots,
    stays,
)
from kvplugin.topology.triton_structure import (
    UNIFORM,
    WITNESS,
    block_witnesses,
    is_structural,
    run_tokens_before,
    windows,
)

SLOTS_PER_WARP, MOST_WARPS = 256, 16
ROWS_AT_ONCE = tl.constexpr(128)
"""Rows that one step of the search for a later row of the same slot looks at."""
SINK_HIT, LOCAL_HIT = tl.constexpr(int(Signal.SINK_HIT)), tl.constexpr(int(Signal.LOCAL_HIT))
WITNESS_HIT = tl.constexpr(int(Signal.WITNESS_HIT))
EVICTED_SHARE, EVICTION_MARGIN = tl.constexpr(int(Signal.EVICTED_SHARE)), tl.constexpr(int(Signal.EVICTION_MARGIN))
STEP_OVERLAP, LEADER_OVERLAP = tl.constexpr(int(Signal.STEP_OVERLAP)), tl.constexpr(int(Signal.LEADER_OVERLAP))
VALID_DEFICIT, INVALID_SHARE = tl.constexpr(int(Signal.VALID_DEFICIT)), tl.constexpr(int(Signal.INVALID_SHARE))
COLUMNS, PER_SIGNAL = tl.constexpr(len(SignalColumn)), tl.constexpr(COLUMNS_PER_SIGNAL)
BUCKET_BOUNDS, MICRO = tl.constexpr(BOUNDS), tl.constexpr(UNIT)
BUCKETS = tl.constexpr(len(BOUNDS))
NO_TOKEN = tl.constexpr(2**31 - 1)
"""Above every token: rows have at most so many."""
GOLDEN, FIRST_FACTOR, SECOND_FACTOR = (tl.constexpr(factor) for factor in (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35))
LOW_32_BITS = tl.constexpr(0xFFFFFFFF)


@triton.jit
def _times(value, factor: tl.constexpr):
    """Product modulo 2**32 of uint64 numbers below that."""
    return (value * tl.full((), factor, tl.uint64)) & tl.full((), LOW_32_BITS, tl.uint64)


@triton.jit
def hash32(value):
    """The finaliser of MurmurHash3: 32 bits in, 32 well-mixed bits out, in uint64."""
    value ^= value >> 16
    value = _times(value, FIRST_FACTOR)
    value ^= value >> 13
    value = _times(value, SECOND_FACTOR)
    return value ^ (value >> 16)


@triton.jit
def sampled_row(r, row_lengths, row_live, row_phase, row_arm, row_request, policies, arms, enabled, every):
    """Whether row ``r``, or which of several, is observed, with its length, phase, arm and request.

    Bursts of 8 lengths, so that steps can be compared.
    """
    length, _, _ = row_metadata(r, row_lengths, None, None)
    phase, arm, known = phase_and_arm(r, row_phase, row_arm, arms)
    request = tl.full((), 0, tl.int32)
    if row_request is not None:
        request = tl.load(row_request + r)
    mixed = _times((tl.maximum(length, 0) >> 3).to(tl.uint64) & LOW_32_BITS, GOLDEN)
    mixed = hash32(mixed ^ (request.to(tl.int64) & LOW_32_BITS).to(tl.uint64))
    policy = policies + arm.to(tl.int64) * POLICY_COLUMNS
    acts = is_live(r, length, row_live, enabled) & known & (length > 0) & (length <= tl.load(policy + MAX_ROW_LENGTH))
    acts &= (tl.load(policy + MODE) != DISABLED) & in_phase(policy, phase)
    acts &= mixed.to(tl.int64) % every == 0
    return acts, length, phase, arm, request


@triton.jit
def put_value(counts, signal: tl.constexpr, value, seen):
    """Count one value of a signal where it was seen, in the counters of an arm and phase."""
    value = tl.minimum(tl.maximum(value, 0.0), 1.0)
    bucket = tl.full((), 0, tl.int32)
    for i in tl.static_range(BUCKETS):
        bucket += (value > tl.full((), BUCKET_BOUNDS[i], tl.float64)).to(tl.int32)
    cells = counts + signal * PER_SIGNAL
    one = tl.full((), 1, tl.int64)
    tl.atomic_add(cells + bucket, one, mask=seen, sem="relaxed")
    units = tl.floor(value * MICRO + 0.5).to(tl.int64)
    tl.atomic_add(cells + BUCKETS + 1, units, mask=seen, sem="relaxed")


@triton.jit
def put_share(counts, signal: tl.constexpr, part, whole):
    """Count one of two numbers as a share of the other, unless that is 0."""
    share = part.to(tl.float64) / tl.maximum(whole, 1).to(tl.float64)
    put_value(counts, signal, share, whole > 0)


@triton.jit
def _count(mask):
    return tl.sum(mask.to(tl.int32), 0)


@triton.jit
def put_overlap(counts, signal: tl.constexpr, token, valid, layer, request, length, memory, width, BLOCK: tl.constexpr):
    """Compare the valid tokens of a row with a layer's set of its request at some length, if that is there."""
    tokens, tags, slots = memory
    line = layer.to(tl.int64) * slots + (request & (slots - 1))
    exists = (layer >= 0) & (length > 0)
    there = tl.load(tags + 2 * line, mask=exists, other=0) == request
    there &= tl.load(tags + 2 * line + 1, mask=exists, other=0) == length
    if exists & there:
        stored_row = tokens + line * width
        place = tl.arange(0, BLOCK)
        stored = _count(tl.load(stored_row + place, mask=place < width, other=-1) >= 0)
        # How many of the stored tokens are not above each of the row's, by halving.
        below = tl.full((BLOCK,), 0, tl.int32)
        for bit in tl.static_range(0, 16):
            if (BLOCK >> bit) > 0:
                further = below + (BLOCK >> bit)
                inside = valid & (further <= stored)
                below = tl.where(
                    inside & (tl.load(stored_row + further - 1, mask=inside, other=NO_TOKEN) <= token), further, below
                )
        found = valid & (below > 0)
        shared = _count(found & (tl.load(stored_row + below - 1, mask=found, other=-1) == token))
        put_share(counts, signal, shared, stored + _count(valid) - shared)


@triton.jit
def put_eviction(counts, row, tile, structure, need, policy, scores, BLOCK: tl.constexpr):
    """The signals of an eviction in which ``need`` > 0 learned tokens leave."""
    token, valid, structural = tile
    pointer, stride = scores
    candidate = candidates(token, valid, structural, 0)
    key = eviction_keys(token, candidate, 0, policy, scores, row[2], BLOCK, True)
    cut = eviction_cut(need, (token, key), row, structure, policy, scores, 1, BLOCK, True, True)
    kept = stays(token, candidate, key, cut)
    leaves = candidate & (kept == 0)
    score = tl.load(pointer + token.to(tl.int64) * stride, mask=valid, other=0.0).to(tl.float64)
    score = tl.where(score == score, score, float("-inf"))
    finite = valid & (tl.abs(score) < float("inf"))
    worth = tl.where(valid, tl.maximum(score, 0.0), 0.0)
    weight, evicted = tl.sum(worth, 0), tl.sum(tl.where(leaves, worth, 0.0), 0)
    weighs = (weight > 0.0) & (weight < float("inf"))
    put_value(counts, EVICTED_SHARE, tl.where(weighs, evicted, 0.0) / tl.where(weighs, weight, 1.0), weighs)
    lowest = tl.min(tl.where(kept, score, float("inf")), 0)
    highest = tl.max(tl.where(leaves, score, float("-inf")), 0)
    span = tl.max(tl.where(finite, score, float("-inf")), 0) - tl.min(tl.where(finite, score, float("inf")), 0)
    apart = (span > 0.0) & (tl.abs(lowest) < float("inf")) & (tl.abs(highest) < float("inf"))
    margin = tl.where(apart, lowest, 0.0) - tl.where(apart, highest, 0.0)
    put_value(counts, EVICTION_MARGIN, margin / tl.where(apart, span, 1.0), apart)


@triton.jit(do_not_specialize=["width", "scores_row_stride", "columns", "arms", "every", "slots", "leader"])
def observe_kernel(
    learned,
    learned_row_stride,
    learned_slot_stride,
    width,
    row_lengths,
    row_live,
    row_phase,
    row_arm,
    row_request,
    scores,
    scores_row_stride,
    scores_column_stride,
    columns,
    score_start,
    policies,
    arms,
    enabled,
    every,
    counters,
    tokens,
    tags,
    slots,
    leader,
    BLOCK: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """Count the signals of row ``program_id(0)`` if it is sampled; ``scores`` is any pointer where there are none."""
    r = tl.program_id(0)
    sampled, long_length, phase, arm, request = sampled_row(
        r, row_lengths, row_live, row_phase, row_arm, row_request, policies, arms, enabled, every
    )
    if sampled == 0:
        return
    length = long_length.to(tl.int32)
    policy = policies + arm.to(tl.int64) * POLICY_COLUMNS
    counts = counters + (arm.to(tl.int64) * 2 + phase) * COLUMNS
    zero = tl.full((), 0, tl.int64)
    row = (learned + r.to(tl.int64) * learned_row_stride, learned_slot_stride, width, zero, length, 0)
    _, token, valid, bad = read_slots(row, 0, BLOCK)
    found, most = _count(valid), tl.minimum(width, length)
    put_share(counts, INVALID_SHARE, _count(bad), width)
    put_share(counts, VALID_DEFICIT, tl.maximum(most - found, 0), most)
    if tokens is not None:
        if phase == 1:
            memory = (tokens, tags, slots)
            put_overlap(counts, STEP_OVERLAP, token, valid, leader, request, length - 1, memory, width, BLOCK)
            put_overlap(counts, LEADER_OVERLAP, token, valid, leader - 1, request, length, memory, width, BLOCK)
    if length > width:
        sinks, local_start = windows(policy, length)
        witnesses = block_witnesses(policy, length, sinks, local_start, learned, 0, 1, False)
        structure = (sinks, local_start, witnesses)
        structural = is_structural(token, structure, 1)
        sink, local = valid & (token < sinks), valid & (token >= local_start)
        witness = valid & structural & (token >= sinks) & (token < local_start)
        runs = run_tokens_before(local_start, witnesses, 1) - run_tokens_before(sinks, witnesses, 1)
        put_share(counts, SINK_HIT, _count(sink), sinks)
        put_share(counts, LOCAL_HIT, _count(local), length - local_start)
        put_share(counts, WITNESS_HIT, _count(witness), runs)
        if HAS_SCORES:
            mode = tl.load(policy + MODE)
            need = found - _count(valid & structural) - (width - (sinks + length - local_start + runs))
            start = row_metadata(r, row_lengths, None, score_start)[2]
            evicts = (need > 0) & (merges(mode) | (mode == OBSERVE)) & (tl.load(policy + WITNESS) == UNIFORM)
            evicts &= tl.load(policy + EVICTION) != NOTHING_LEAVES
            if evicts & (start >= 0) & (start <= columns - long_length):
                pointer = scores + (r.to(tl.int64) * scores_row_stride + start * scores_column_stride)
                tile = (token, valid, structural)
                put_eviction(counts, row, tile, structure, need, policy, (pointer, scores_column_stride), BLOCK)


@triton.jit(do_not_specialize=["rows", "width", "arms", "every", "slots", "leader"])
def remember_kernel(
    learned,
    learned_row_stride,
    learned_slot_stride,
    rows,
    width,
    row_lengths,
    row_live,
    row_phase,
    row_arm,
    row_request,
    policies,
    arms,
    enabled,
    every,
    tokens,
    tags,
    slots,
    leader,
    BLOCK: tl.constexpr,
):
    """Put what row ``program_id(0)`` learned into the memory, if it is sampled and no later row takes its slot."""
    r = tl.program_id(0)
    sampled, long_length, phase, _, request = sampled_row(
        r, row_lengths, row_live, row_phase, row_arm, row_request, policies, arms, enabled, every
    )
    if (sampled & (phase == 1)) == 0:
        return
    slot = request & (slots - 1)
    later = tl.full((), 0, tl.int32)
    for first in range(r + 1, rows, ROWS_AT_ONCE):
        other = first + tl.arange(0, ROWS_AT_ONCE)
        others = sampled_row(
            tl.minimum(other, rows - 1),
            row_lengths,
            row_live,
            row_phase,
            row_arm,
            row_request,
            policies,
            arms,
            enabled,
            every,
        )
        also = others[0] & (other < rows) & (others[2] == 1) & ((others[4] & (slots - 1)) == slot)
        later += _count(also)
    if later > 0:
        return
    length = long_length.to(tl.int32)
    zero = tl.full((), 0, tl.int64)
    row = (learned + r.to(tl.int64) * learned_row_stride, learned_slot_stride, width, zero, length, 0)
    _, token, valid, _ = read_slots(row, 0, BLOCK)
    ordered = tl.sort(tl.where(valid, token, NO_TOKEN))
    line = tl.full((), 0, tl.int64) + leader
    line = line * slots + slot
    place = tl.arange(0, BLOCK)
    tl.store(tokens + line * width + place, tl.where(ordered == NO_TOKEN, -1, ordered), mask=place < width)
    tl.store(tags + 2 * line, request)
    tl.store(tags + 2 * line + 1, length)


def launch_shape(width: int) -> dict[str, int]:
    """Compile-time settings for rows of ``width`` slots."""
    block = max(triton.next_power_of_2(width), 32)
    warps = min(max(block // SLOTS_PER_WARP, 1), MOST_WARPS)
    # Left alone, ptxas spills a few values where that lets one more program onto a multiprocessor.
    return {"BLOCK": block, "num_warps": warps, "maxnreg": min(MOST_REGISTERS, REGISTERS // (32 * warps))}


def observe_into(call: SignalCall) -> None:
    """Add to ``call.counters`` and change the memory; see :func:`kvplugin.topology.signals.op.observe_signals`."""
    learned = call.learned.contiguous() if spans_too_far(call.learned) else call.learned
    rows, width = learned.shape
    if rows == 0:
        return
    scores = learned if call.scores is None else call.scores
    per_row = [
        *(_flat(call.row_lengths), _flat(call.row_live), _flat(call.row_phase), _flat(call.row_arm)),
        _flat(call.row_request),
    ]
    policies = (call.policies, len(call.policies), call.enabled, call.every)
    memory = (call.tokens, call.tags, 1 if call.tokens is None else call.tokens.shape[1], call.leader)
    with torch.cuda.device_of(learned):
        observe_kernel[(rows,)](
            learned,
            *learned.stride(),
            width,
            *per_row,
            scores,
            *scores.stride(),
            scores.shape[1],
            _flat(call.score_start),
            *policies,
            call.counters,
            *memory,
            HAS_SCORES=call.scores is not None,
            **launch_shape(width),
        )
        if call.tokens is not None:
            remember_kernel[(rows,)](
                learned, *learned.stride(), rows, width, *per_row, *policies, *memory, **launch_shape(width)
            )


def _flat(values: Tensor | None) -> Tensor | None:
    """Per-row values side by side, as kernels read them; copied only where they are not."""
    return None if values is None else values.contiguous()


FIXED: dict[str, object] = {"learned_slot_stride": 1, "scores_column_stride": 1, "score_start": None}
POINTERS = {**ROW_POINTERS, "learned": "*i32", "row_request": "*i32", "tokens": "*i32", "tags": "*i32"}


def variants() -> list[KernelVariant]:
    """Specialisations that a serving engine compiles, to be compiled ahead of time."""
    scored = {**POINTERS, "scores": "*fp32", "counters": "*i64"}
    return [
        _variant("signals", observe_kernel, scored, {**FIXED, "HAS_SCORES": True}, 2048),
        _variant("signals_memory", remember_kernel, POINTERS, {"learned_slot_stride": 1}, 2048),
        _variant("signals", observe_kernel, scored, {**FIXED, "HAS_SCORES": True}, 2176),
        _variant("signals_memory", remember_kernel, POINTERS, {"learned_slot_stride": 1}, 2176),
    ]


def _variant(name: str, kernel: Any, pointers: dict[str, str], fixed: dict[str, object], width: int) -> KernelVariant:
    shape = launch_shape(width)
    settings = {**fixed, "BLOCK": shape["BLOCK"]}
    signature = signature_of(kernel, pointers, fixed)
    return KernelVariant(f"{name}_k{width}", kernel, signature, settings, shape["num_warps"], shape["maxnreg"])
