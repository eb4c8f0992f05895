"""The policy on the CPU: one pass per row, chunks of rows on several threads, the same results as the reference."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kvplugin.config import MismatchAction, Mode
from kvplugin.topology import torch_ops
from kvplugin.topology.call import LiftCall, PolicyCall
from kvplugin.topology.numba_args import kernel_policy, matrix, score_bits
from kvplugin.topology.numba_rows import PolicyBatch, apply_rows, lift_rows
from kvplugin.topology.numba_threads import CREW, thread_count
from kvplugin.topology.numba_workspace import Lane, workspace
from kvplugin.topology.reference import call_bypass

_INDEX_DTYPES: dict[torch.dtype, np.dtype[np.signedinteger]] = {
    torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64),
}


def apply_into(call: PolicyCall) -> None:
    """Rewrite ``call.topk`` and add to ``call.counters``; see :func:`kvplugin.topology.op.apply_topology_policy`."""
    if call.params.mode is Mode.DISABLED:
        return
    batch, lanes = batch_and_lanes(call, thread_count(*call.topk.shape))
    CREW.run([partial(apply_rows, tuple(batch), lane) for lane in lanes])
    collect(call, lanes)


def batch_and_lanes(call: PolicyCall, threads: int) -> tuple[PolicyBatch, list[Lane]]:
    """The call as kernels receive it, and scratch for each thread."""
    rows, width = call.topk.shape
    scratch = workspace()
    block_scores = scratch.block_scores(call.witness_scores, rows)
    scratch.cursor[0] = 0
    batch = PolicyBatch(
        scratch.cursor,
        matrix(call.topk),
        score_bits(call.scores),
        block_scores,
        scratch.facts(call.row_lengths, call.row_live, call.row_phase, call.offsets, call.score_start),
        kernel_policy(call.params, call.topk.dtype, call_bypass=call_bypass(call.params, rows)),
    )
    return batch, scratch.lanes(threads, width, block_scores.shape[1], _INDEX_DTYPES[call.topk.dtype])


def collect(call: PolicyCall, lanes: Sequence[Lane]) -> None:
    """Add what the lanes counted to ``call.counters``, and record the first coordinate mismatch if it is asked for."""
    counters = call.counters.numpy()
    for lane in lanes:
        counters += lane.counts
    if call.params.mismatch is MismatchAction.RAISE and call.error is not None and call.error[0] == 0:
        found = [lane.error for lane in lanes if lane.error[0]]
        if found:
            call.error.copy_(torch.from_numpy(min(found, key=lambda error: int(error[0]))))


def lift_into(call: LiftCall) -> None:
    """Lift ``call.scores``; see :func:`kvplugin.topology.op.lift_structural_scores`."""
    p = call.params
    rows = call.scores.shape[0]
    if not p.mode.merges or call_bypass(p, rows) is not None:
        return
    if call.ranks > 1:  # no engine deals out scores to CPUs: one form of it is enough
        torch_ops.lift_into(call)
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
