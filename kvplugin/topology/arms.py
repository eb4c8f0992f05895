"""Rows of several arms with an implementation that knows one policy: one pass per arm over its own rows."""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from kvplugin.topology.call import ArmsCall, LiftArmsCall, LiftCall, PolicyCall
from kvplugin.topology.counters import Counter
from kvplugin.topology.params import PolicyParams
from kvplugin.topology.table import tables_arms


def apply_arms_into(implementation: ModuleType, call: ArmsCall) -> None:
    """Rewrite ``call.topk`` arm by arm and add to ``call.counters``."""
    live = _live_rows(call)
    for arm, params in enumerate(_arms(call)):
        implementation.apply_into(
            PolicyCall(
                topk=call.topk,
                row_lengths=call.row_lengths,
                row_live=_rows_of_arm(call, live, arm),
                row_phase=call.row_phase,
                offsets=call.offsets,
                scores=call.scores,
                score_start=call.score_start,
                witness_scores=call.witness_scores,
                params=params,
                counters=call.counters[0, arm],
                error=call.error,
            )
        )
    if call.row_arm is not None:
        _count_unknown(call, live)


def lift_arms_into(implementation: ModuleType, call: LiftArmsCall) -> None:
    """Lift ``call.scores`` arm by arm."""
    live = _live_rows(call)
    for arm, params in enumerate(_arms(call)):
        rows = _rows_of_arm(call, live, arm)
        implementation.lift_into(
            LiftCall(call.scores, call.row_lengths, rows, call.row_phase, call.score_start, params)
        )


def _arms(call: ArmsCall | LiftArmsCall) -> list[PolicyParams]:
    return tables_arms(call.policies if call.row_arm is not None else call.policies[:1])


def _live_rows(call: ArmsCall | LiftArmsCall) -> Tensor | None:
    """Rows to look at, bool ``[T]``; None = all of them."""
    on = call.enabled != 0
    if call.row_live is not None:
        return call.row_live & on
    return None if bool(on) else torch.zeros_like(call.row_lengths, dtype=torch.bool)


def _rows_of_arm(call: ArmsCall | LiftArmsCall, live: Tensor | None, arm: int) -> Tensor | None:
    if call.row_arm is None:
        return live
    own = call.row_arm == arm
    return own if live is None else live & own


def _count_unknown(call: ArmsCall, live: Tensor | None) -> None:
    assert call.row_arm is not None
    known = (call.row_arm >= 0) & (call.row_arm < len(call.policies))
    unknown = ~known & (call.row_lengths >= 0)
    if live is not None:
        unknown &= live
    decode = torch.ones_like(unknown) if call.row_phase is None else call.row_phase != 0
    for phase, rows in enumerate((unknown & ~decode, unknown & decode)):
        counts = call.counters[0, 0, phase]
        counts[Counter.SEEN] += rows.sum()
        counts[Counter.BYPASS_UNKNOWN_ARM] += rows.sum()
