"""Rows of several arms with an implementation that knows one policy: one pass per arm over its own rows."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from kvplugin.config import Mode
from kvplugin.topology.call import ArmsCall, LiftArmsCall, LiftCall, PolicyCall
from kvplugin.topology.counters import Counter
from kvplugin.topology.params import PolicyParams
from kvplugin.topology.table import tables_arms


def apply_arms_into(implementation: ModuleType, call: ArmsCall) -> None:
    """Rewrite ``call.topk`` and add to ``call.counters``; waits for the device, as policies are read on the host."""
    if not call.enabled.item():
        return
    for arm, params, live in _arms(call):
        implementation.apply_into(call_of_arm(call, arm, params, live))
    if call.row_arm is not None:
        _count_unknown(call, call.row_arm)


def call_of_arm(call: ArmsCall, arm: int, params: PolicyParams, live: Tensor | None) -> PolicyCall:
    """The part of a call that concerns one arm: its policy, the live rows that follow it, and its counters."""
    return PolicyCall(
        topk=call.topk,
        row_lengths=call.row_lengths,
        row_live=live,
        row_phase=call.row_phase,
        offsets=call.offsets,
        scores=call.scores,
        score_start=call.score_start,
        witness_scores=call.witness_scores,
        params=params,
        counters=call.counters[0, arm],
        error=call.error,
    )


def lift_arms_into(implementation: ModuleType, call: LiftArmsCall) -> None:
    """Lift ``call.scores`` arm by arm; waits for the device as well."""
    if not call.enabled.item():
        return
    for _, params, live in _arms(call):
        implementation.lift_into(
            LiftCall(call.scores, call.row_lengths, live, call.row_phase, call.score_start, params, *call[-3:])
        )


def _arms(call: ArmsCall | LiftArmsCall) -> Iterator[tuple[int, PolicyParams, Tensor | None]]:
    """Each arm that does something, its policy, and the live rows that follow it."""
    if call.row_arm is None:
        yield 0, tables_arms(call.policies[:1])[0], call.row_live
        return
    for arm, params in enumerate(tables_arms(call.policies)):
        if params.mode is Mode.DISABLED:
            continue
        own = call.row_arm == arm
        yield arm, params, own if call.row_live is None else own & call.row_live


def _count_unknown(call: ArmsCall, row_arm: Tensor) -> None:
    known = (row_arm >= 0) & (row_arm < len(call.policies))
    unknown = ~known & (call.row_lengths >= 0)
    if call.row_live is not None:
        unknown &= call.row_live
    decode = torch.ones_like(unknown) if call.row_phase is None else call.row_phase != 0
    for phase, rows in enumerate((unknown & ~decode, unknown & decode)):
        counts = call.counters[0, 0, phase]
        counts[Counter.SEEN] += rows.sum()
        counts[Counter.BYPASS_UNKNOWN_ARM] += rows.sum()
