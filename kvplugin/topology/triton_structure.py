"""Structural sets in closed form, for kernels: sinks, local window, and witnesses as runs of tokens.

A row's structure is a tuple ``(sinks, local_start, witnesses)``: tokens ``[0, sinks)``, ``[local_start, L)``, and the
witness runs' tokens between the two. ``witnesses`` is ``(stride, count, span, starts)``: run ``i`` of ``count`` begins
at ``stride * i`` (from 1 on) and has ``span`` tokens, or, where ``stride`` is 0, begins at ``starts[i]``: int32
``[LISTED]``, ascending, ``FAR`` after the last one. Numbering all runs' tokens in order gives each a rank, so that
counting, membership and enumeration need no memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvplugin.config import Witness
from kvplugin.topology.table import FIELDS

FAR = tl.constexpr(2**31 - 1)
"""A run that no row reaches."""


def column(name: str) -> tl.constexpr:
    """Column of a policy table, for kernels."""
    return tl.constexpr([field for field, _ in FIELDS].index(name))


BLOCK_SIZE, SINK, SINK_IN_BLOCKS = column("block_size"), column("sink"), column("sink_in_blocks")
LOCAL, LOCAL_IN_BLOCKS = column("local"), column("local_in_blocks")
WITNESS, WITNESS_BLOCKS, SEGMENTS = column("witness"), column("witness_blocks"), column("segments")
UNIFORM = tl.constexpr(list(Witness).index(Witness.UNIFORM))
DRIFT = tl.constexpr(list(Witness).index(Witness.DRIFT))
COVERAGE = tl.constexpr(list(Witness).index(Witness.COVERAGE))


@triton.jit
def windows(policy, length):
    """Sinks and start of the local window of a row of ``length`` tokens."""
    block = tl.load(policy + BLOCK_SIZE)
    sinks = tl.load(policy + SINK) * tl.where(tl.load(policy + SINK_IN_BLOCKS) != 0, block, 1)
    local = tl.load(policy + LOCAL)
    blocks = (length + block - 1) // block
    in_blocks = tl.load(policy + LOCAL_IN_BLOCKS) != 0
    start = tl.where(in_blocks, (blocks - local) * block, length - local)
    sinks = tl.minimum(sinks, length).to(tl.int32)
    # A window of 0 blocks would begin after the row's end where the last block is not full.
    start = tl.minimum(tl.maximum(start, 0), length).to(tl.int32)
    return sinks, tl.maximum(start, sinks)


@triton.jit
def no_witnesses(LISTED: tl.constexpr):
    """Witnesses of a row without any."""
    zero = tl.full((), 0, tl.int32)
    starts = tl.full((LISTED,), FAR, tl.int32)
    return zero, zero, zero + 1, starts


@triton.jit
def block_witnesses(policy, length, sinks, local_start, scores, blocks, LISTED: tl.constexpr, HAS_SCORES: tl.constexpr):
    """Witnesses that follow from the row's length, and from its block scores ``scores[:blocks]`` for ``drift``."""
    _, _, _, starts = no_witnesses(LISTED)
    block = tl.load(policy + BLOCK_SIZE).to(tl.int32)
    wanted = tl.load(policy + WITNESS_BLOCKS).to(tl.int32)
    kind = tl.load(policy + WITNESS)
    have = (length + block - 1) // block
    stride = tl.maximum(have // (wanted + 1), 1) * block
    count = wanted
    if kind != UNIFORM:
        stride = stride * 0
        count = count * 0
        if HAS_SCORES and LISTED > 1:
            if kind == DRIFT:
                starts = _drift_starts(wanted, block, length, sinks, local_start, scores, blocks, LISTED)
                count = wanted
    return stride, count, block, starts


@triton.jit
def _drift_starts(wanted, block, length, sinks, local_start, scores, blocks, LISTED: tl.constexpr):
    """First tokens of the best blocks outside both windows, ascending: one pass over all blocks for each."""
    starts = tl.full((LISTED,), FAR, tl.int32)
    best, at = tl.full((), float("inf"), tl.float64), tl.full((), -1, tl.int32)
    for i in range(wanted):
        next_best, next_at = tl.full((), float("-inf"), tl.float64), tl.full((), FAR, tl.int32)
        for first in range(0, blocks, 256):
            index = first + tl.arange(0, 256)
            score = tl.load(scores + index, mask=index < blocks, other=0.0).to(tl.float64)
            score = tl.where(score == score, score, float("-inf"))
            token = index.to(tl.int64) * block
            free = (index < blocks) & (token < length) & (token >= sinks)
            free &= tl.minimum(token + block, length) <= local_start
            free &= (score < best) | ((score == best) & (index > at))
            top = tl.max(tl.where(free, score, float("-inf")), 0)
            where = tl.min(tl.where(free & (score == top), index, FAR), 0)
            better = (where != FAR) & ((next_at == FAR) | (top > next_best))
            next_best = tl.where(better, top, next_best)
            next_at = tl.where(better, where, next_at)
        best, at = next_best, next_at
        start = tl.where(at == FAR, FAR, at * block)
        starts = tl.where(tl.arange(0, LISTED) == i, start, starts)
    return tl.sort(starts)


@triton.jit
def run_tokens_before(token, witnesses, LISTED: tl.constexpr):
    """How many tokens of the runs are below a token: the rank of the first one that is not."""
    stride, count, span, starts = witnesses
    before = tl.full((), 0, tl.int32)
    if stride != 0:
        run = token // tl.maximum(stride, 1)
        whole = tl.minimum(tl.maximum(run - 1, 0), count) * span
        inside = tl.minimum(token - run * stride, span)
        before = whole + tl.where((run >= 1) & (run <= count), inside, 0)
    elif LISTED > 1:
        before = tl.sum(tl.where(starts < token, tl.minimum(token - tl.minimum(starts, token), span), 0), 0)
    return before


@triton.jit
def run_token(rank, witnesses, LISTED: tl.constexpr):
    """The runs' token of each rank, int32 of any shape; beyond the last one, anything."""
    stride, _, span, starts = witnesses
    run = rank // span
    token = (run + 1) * stride
    if LISTED > 1:
        listed = tl.gather(starts, tl.minimum(tl.maximum(run, 0), LISTED - 1), 0)
        token = tl.where(stride != 0, token, listed)
    return token + (rank - run * span)


@triton.jit
def in_runs(token, witnesses, LISTED: tl.constexpr):
    """Which tokens, int32 of any shape and >= 0, lie in a run."""
    stride, count, span, starts = witnesses
    by = tl.maximum(stride, 1)
    run = token // by
    inside = (stride != 0) & (run >= 1) & (run <= count) & (token - run * by < span)
    if LISTED > 1:
        # The last start that is not above the token, by halving.
        last = token * 0
        for bit in tl.static_range(1, 16):
            if (LISTED >> bit) > 0:
                further = last + (LISTED >> bit)
                last = tl.where(tl.gather(starts, further, 0) <= token, further, last)
        start = tl.gather(starts, last, 0)
        inside |= (stride == 0) & (start <= token) & (token - start < span)
    return inside


@triton.jit
def structure_size(structure, length, low, LISTED: tl.constexpr):
    """Structural tokens from ``low`` on."""
    sinks, local_start, witnesses = structure
    runs_from = tl.minimum(tl.maximum(sinks, low), local_start)
    runs = run_tokens_before(local_start, witnesses, LISTED) - run_tokens_before(runs_from, witnesses, LISTED)
    return tl.maximum(sinks - low, 0) + tl.maximum(length - tl.maximum(local_start, low), 0) + runs


@triton.jit
def structural_token(rank, structure, length, low, LISTED: tl.constexpr):
    """The structural tokens from ``low`` on, numbered from 0: sinks, local window, witnesses."""
    sinks, local_start, witnesses = structure
    first_sink = tl.minimum(low, sinks)
    first_local = tl.maximum(local_start, low)
    in_sinks = sinks - first_sink
    in_windows = in_sinks + tl.maximum(length - first_local, 0)
    runs_before = run_tokens_before(tl.minimum(tl.maximum(sinks, low), local_start), witnesses, LISTED)
    token = run_token(rank - in_windows + runs_before, witnesses, LISTED)
    token = tl.where(rank < in_windows, first_local + rank - in_sinks, token)
    return tl.where(rank < in_sinks, first_sink + rank, token)


@triton.jit
def is_structural(token, structure, LISTED: tl.constexpr):
    """Which tokens of the row are structural."""
    sinks, local_start, witnesses = structure
    return (token < sinks) | (token >= local_start) | in_runs(token, witnesses, LISTED)
