"""The policy on the CPU: one pass per row, chunks of rows on several threads, the same results as the reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch

from kvplugin.config import MismatchAction, Mode
from kvplugin.topology.call import LiftCall, PolicyCall
from kvplugin.topology.numba_args import kernel_policy, matrix, score_bits
from kvplugin.topology.numba_rows import apply_rows, lift_rows
from kvplugin.topology.numba_threads import CREW, thread_count
from kvplugin.topology.numba_workspace import workspace
from kvplugin.topology.reference import call_bypass

_INDEX_DTYPES: dict[torch.dtype, np.dtype[np.signedinteger]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}


def apply_into(call: PolicyCall) -> None:
    """Rewrite ``call.topk`` and add to ``call.counters``; see :func:`kvplugin.topology.op.apply_topology_policy`."""
    p = call.params
    if p.mode is Mode.DISABLED:
        return
    rows, width = call.topk.shape
    scratch = workspace()
    block_scores = scratch.block_scores(call.witness_scores, rows)
    lanes = scratch.lanes(thread_count(rows, width), width, block_scores.shape[1], _INDEX_DTYPES[call.topk.dtype])
    arguments = (
        scratch.cursor,
        matrix(call.topk),
        score_bits(call.scores),
        block_scores,
        scratch.facts(call.row_lengths, call.row_live, call.row_phase, call.offsets, call.score_start),
        kernel_policy(p, call.topk.dtype, call_bypass=call_bypass(p, rows)),
    )
    scratch.cursor[0] = 0
    CREW.run([partial(apply_rows, *arguments, lane) for lane in lanes])
    counters = call.counters.numpy()
    for lane in lanes:
        counters += lane.counts
    if p.mismatch is MismatchAction.RAISE and call.error is not None and call.error[0] == 0:
        found = [lane.error for lane in lanes if lane.error[0]]
        if found:
            call.error.copy_(torch.from_numpy(min(found, key=lambda error: int(error[0]))))


def lift_into(call: LiftCall) -> None:
    """Lift ``call.scores``; see :func:`kvplugin.topology.op.lift_structural_scores`."""
    p = call.params
    rows = call.scores.shape[0]
    if not p.mode.merges or call_bypass(p, rows) is not None:
        return
    scratch = workspace()
    (lane,) = scratch.lanes(1, p.width, 0, _INDEX_DTYPES[torch.int32])
    lift_rows(
        score_bits(call.scores),
        scratch.block_scores(None, rows),
        scratch.facts(call.row_lengths, call.row_live, call.row_phase, None, call.score_start),
        kernel_policy(p, torch.int64, lifts=True),
        lane,
    )
