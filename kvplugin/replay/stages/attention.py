"""Attention and log-probability stages, and what their plots show."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvplugin.replay.capture.records import Record
from kvplugin.replay.compare import Comparison
from kvplugin.replay.compute import Replayed
from kvplugin.replay.drift import Drift, measure
from kvplugin.replay.report import Stage, StageReport, Status
from kvplugin.replay.stages.hypotheses import explain
from kvplugin.replay.tolerance import log_prob_tolerance, out_tolerance

NO_LOG_PROBS = "the capture holds no head, and no log-probabilities of decode and prefill at this layer"
SEVERAL_QUERIES = "an engine samples after the newest query token alone; capture one with --rows 1"


def attention_stage(record: Record, others: Sequence[Record], comparison: Comparison) -> StageReport:
    """The engine's output and log-sum-exp against the replay's; a drift is explained if a fault reproduces it."""
    report = comparison.report
    drifts = [drift for drift in report.drifts if not drift.name.startswith("log-prob")]
    over = [drift for drift in drifts if not drift.within]
    findings = [f"{drift.name}: {drift.max:.3g}, tolerance {drift.tolerance:.3g}" for drift in over] + report.notes
    if any("engine" in drift.name for drift in over):
        findings += explain(record, others, comparison.replayed)
    observed = record.observed.out is not None or record.observed.lse is not None
    reason = "" if observed else "the capture holds no output of the engine; only the replay's own forms are compared"
    return StageReport(
        stage=Stage.ATTENTION,
        status=Status.DRIFT if over else Status.MATCH,
        reason=reason,
        drifts=drifts,
        findings=findings,
    )


def log_prob_stage(record: Record, comparison: Comparison) -> StageReport:
    """Log-probabilities of decode against those of a prefill, and of the replay where there is a head."""
    drifts = [drift for drift in comparison.report.drifts if drift.name.startswith("log-prob")]
    if record.log_probs is not None and record.reference_log_probs is not None:
        drifts.append(_log_prob_drift(record))
    if not drifts:
        several = record.inputs.q.shape[2] > 1 and record.log_probs is None
        reason = SEVERAL_QUERIES if several else NO_LOG_PROBS
        return StageReport(stage=Stage.LOG_PROBS, status=Status.UNAVAILABLE, reason=reason)
    findings = [
        f"{drift.name}: {drift.max:.3g}, tolerance {drift.tolerance:.3g}" for drift in drifts if not drift.within
    ]
    status = Status.DRIFT if findings else Status.MATCH
    return StageReport(stage=Stage.LOG_PROBS, status=status, drifts=drifts, findings=findings)


def _log_prob_drift(record: Record) -> Drift:
    assert record.log_probs is not None
    assert record.reference_log_probs is not None
    reference = record.reference_log_probs
    dtype = record.inputs.final_dtype
    # A log-probability of 0 has logits too; 1 is the least they can be taken to be.
    scale = reference.abs().clamp_min(1.0).unsqueeze(-1)
    tolerance = log_prob_tolerance(scale, record.hidden_size, dtype)
    return measure(
        "log-prob, decode vs prefill", record.log_probs, reference, tolerance, ("query",), floor=record.floor.log_prob
    )


def selected_blocks(record: Record) -> list[list[float]]:
    """Share of each logical block's slots that each query selected; empty for dense attention."""
    selection, page = record.inputs.selection, record.inputs.pool.page_size
    if selection is None:
        return []
    blocks = -(-int(record.inputs.kv_seq_lens[0]) // page)
    rows = []
    for chosen in selection[0].long():
        counts = torch.bincount(chosen[chosen >= 0] // page, minlength=blocks)
        rows.append([round(count / page, 4) for count in counts.tolist()])
    return rows


def drift_by_position(record: Record, replayed: Replayed) -> dict[str, list[float]]:
    """Largest output difference of each query token, and its share of the tolerance."""
    if record.observed.out is None:
        return {"position_drift": [], "position_share": []}
    dtype = record.observed.out.dtype
    expected = replayed.flat.out[0].to(dtype)
    off = (record.observed.out[0].double() - expected.double()).abs().nan_to_num(nan=0.0, posinf=0.0)
    limit = (
        out_tolerance(expected, replayed.flat.lse[0], replayed.tokens[0], dtype).double().clamp_min(record.floor.out)
    )
    share = off / limit.clamp_min(torch.finfo(torch.float32).tiny)
    return {"position_drift": off.amax((0, 2)).tolist(), "position_share": share.amax((0, 2)).tolist()}
