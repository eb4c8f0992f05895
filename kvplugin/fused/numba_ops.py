"""The fused form on the CPU: one pass per row on several threads, the same results as the two parts.

A thread rewrites a row and translates it while it is in the core's cache. Rows of one policy only: a call whose rows
follow the policies of several arms, or whose policy does nothing, runs as its two parts
(:mod:`kvplugin.fused.separate`), of which the policy's passes over the rows once per arm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from kvplugin.config import Mode
from kvplugin.fused import separate
from kvplugin.fused.call import FusedCall
from kvplugin.remap.numba_ops import batch_of, hand_over
from kvplugin.remap.numba_rows import RemapBatch, new_scratch, remap_row, remap_stamp
from kvplugin.topology.arms import call_of_arm
from kvplugin.topology.call import ArmsCall, PolicyCall
from kvplugin.topology.numba_jit import entry, fetch_add
from kvplugin.topology.numba_ops import batch_and_lanes, collect
from kvplugin.topology.numba_rows import ROWS_AT_ONCE, PolicyBatch, handle_row
from kvplugin.topology.numba_threads import CREW, thread_count
from kvplugin.topology.numba_workspace import Lane
from kvplugin.topology.table import tables_arms


def fused_into(call: FusedCall) -> None:
    """Rewrite the rows and translate them; see :func:`kvplugin.fused.op.apply_and_remap`."""
    policy = _one_policy(call.policy)
    if policy is None:
        separate.fused_into(call)
        return
    policy_batch, lanes = batch_and_lanes(policy, thread_count(*policy.topk.shape))
    remap_batch = batch_of(call.remap)
    CREW.run([partial(_fused_rows, tuple(policy_batch), lane, tuple(remap_batch)) for lane in lanes])
    collect(policy, lanes)
    hand_over(call.remap, remap_batch)


def _one_policy(call: ArmsCall) -> PolicyCall | None:
    """The call of the one policy that all rows follow; None where rows may follow several, or none."""
    if call.row_arm is not None or len(call.policies) > 1 or not call.enabled:
        return None
    (params,) = tables_arms(call.policies)
    if params.mode is Mode.DISABLED:
        return None
    return call_of_arm(call, 0, params, call.row_live)


def _entry(stamp: int) -> Callable[..., int]:
    """Compile the kernel that Python calls. It returns the stamp, which thereby belongs to its cache key."""

    @entry
    def fused_rows(policy_parts: tuple[Any, ...], lane: Lane, remap_parts: tuple[Any, ...]) -> int:
        batch, remap = PolicyBatch(*policy_parts), RemapBatch(*remap_parts)
        rows, policy, scratch = batch.facts.size, batch.policies[0], new_scratch(remap)
        first = fetch_add(batch.cursor, ROWS_AT_ONCE)
        while first < rows:
            for row in range(first, min(first + ROWS_AT_ONCE, rows)):
                handle_row(row, batch, policy, lane)
                remap_row(row, remap, scratch)
            first = fetch_add(batch.cursor, ROWS_AT_ONCE)
        return stamp

    return fused_rows


_fused_rows = _entry(remap_stamp())
