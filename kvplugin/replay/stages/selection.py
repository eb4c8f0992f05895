"""Indexer and selection stages: scores recomputed, top-k overlap, and what the kernel really read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvplugin.replay.capture.records import Indexer, Record
from kvplugin.replay.drift import Drift, measure
from kvplugin.replay.reconstruct import requests
from kvplugin.replay.report import Stage, StageReport, Status
from kvplugin.replay.rope import RopeLayout, RopeRecord, RopeState, rotate
from kvplugin.replay.tolerance import score_tolerance
from kvplugin.replay.visibility import selected_tokens


def indexer_scores(record: Record, indexer: Indexer) -> Tensor:
    """float32 ``[Sq, length]``, summed in float64; -inf for tokens that a query must not see."""
    request = next(requests(record.inputs))
    query_positions = record.inputs.query_position_ids[0]
    queries = _rotated(indexer.q, query_positions.unsqueeze(1), indexer.rope.q_state, indexer.rope)
    keys = _rotated(indexer.keys, request.positions, indexer.rope.k_state, indexer.rope)
    dots = torch.einsum("thd,sd->ths", queries, keys).relu_()
    scores = torch.einsum("ths,th->ts", dots, indexer.weights.double()).float()
    return scores.masked_fill(request.positions > query_positions.unsqueeze(1), -torch.inf)


def _rotated(x: Tensor, positions: Tensor, state: RopeState, rope: RopeRecord) -> Tensor:
    """float64 ``x``, rotated if it was not; the rotary part may be the head's last elements only."""
    if state is RopeState.POST:
        return x.double()
    dtype = rope.q_dtype if x.dim() == 3 else rope.k_dtype
    return rotate(x, positions, rope).to(dtype).double()


def indexer_stage(record: Record) -> StageReport:
    """Captured scores against recomputed ones."""
    missing = [
        name for name, value in (("indexer inputs", record.indexer), ("scores", record.indexer_scores)) if value is None
    ]
    if record.indexer is None or record.indexer_scores is None:
        return StageReport(
            stage=Stage.INDEXER_SCORES,
            status=Status.UNAVAILABLE,
            reason=f"the capture holds no {' and no '.join(missing)} of this layer",
        )
    drift = _score_drift(record, record.indexer)
    findings = [] if drift.within else _indexer_findings(record, record.indexer)
    status = Status.MATCH if drift.within else Status.DRIFT
    return StageReport(stage=Stage.INDEXER_SCORES, status=status, drifts=[drift], findings=findings)


def _score_drift(record: Record, indexer: Indexer) -> Drift:
    assert record.indexer_scores is not None
    expected = indexer_scores(record, indexer)
    visible = torch.isfinite(expected)
    return measure(
        "indexer scores, engine vs replay",
        record.indexer_scores.masked_fill(~visible, -torch.inf),
        expected,
        score_tolerance(expected, indexer.q.shape[1] * indexer.q.shape[2]),
        ("query", "token"),
        active=visible,
        floor=record.floor.score,
    )


def _indexer_findings(record: Record, indexer: Indexer) -> list[str]:
    """Rotations under which the captured scores come out."""
    rope = indexer.rope
    if RopeState.PRE not in (rope.q_state, rope.k_state):
        return []
    other = RopeLayout.NEOX if rope.layout is RopeLayout.INTERLEAVED else RopeLayout.INTERLEAVED
    candidates = {
        f"the scores come out with the indexer's RoPE layout {other} instead of {rope.layout}": {"layout": other},
        "the scores come out without the indexer's rotation": {"q_state": RopeState.POST, "k_state": RopeState.POST},
    }
    return [
        text
        for text, changes in candidates.items()
        if _score_drift(record, replace(indexer, rope=replace(rope, **changes))).within  # type: ignore[arg-type]
    ]


def selection_stage(record: Record, others: Sequence[Record]) -> StageReport:
    """The indexer's top-k against the scores, and the rows the kernel read against the selection.

    Args:
        others: records of the same request and step at other layers, whose selections may have been mixed up.
    """
    iou: list[float] = []
    findings: list[str] = []
    looked = False
    if record.selection_before is not None and (scores := _best_scores(record)) is not None:
        iou, misplaced = _topk_overlap(record, record.selection_before, scores)
        looked = True
        if misplaced:
            findings.append(f"{misplaced} tokens of the indexer's top-k are beyond a tie with the scores' own top-k")
    if record.physical is not None and record.inputs.selection is not None:
        read = logical_rows(record, record.physical)
        overlap = overlaps(read, record.inputs.selection[0], int(record.inputs.kv_seq_lens[0]))
        iou, looked = iou or overlap, True
        if min(overlap) < 1:
            iou = overlap
            findings += _read_findings(record, read, others, min(overlap))
    if not looked:
        return StageReport(
            stage=Stage.SELECTION,
            status=Status.UNAVAILABLE,
            reason="the capture holds no top-k with scores, and no physical indices with a selection",
        )
    status = Status.DRIFT if findings else Status.MATCH
    return StageReport(stage=Stage.SELECTION, status=status, iou=iou, findings=findings)


def _best_scores(record: Record) -> Tensor | None:
    """Recomputed scores, which a wrong engine cannot have bent; else the captured ones."""
    return record.indexer_scores if record.indexer is None else indexer_scores(record, record.indexer)


def _topk_overlap(record: Record, selection: Tensor, scores: Tensor) -> tuple[list[float], int]:
    """IoU of each query with the scores' own top-k, and how many tokens no tie within tolerance explains."""
    visible = torch.isfinite(scores)
    chosen = selected_tokens(selection, scores.shape[1])
    count = chosen.sum(1, keepdim=True)
    ordered = scores.sort(dim=1, descending=True).values
    threshold = ordered.gather(1, (count - 1).clamp_min(0))
    terms = 1 if record.indexer is None else record.indexer.q.shape[1] * record.indexer.q.shape[2]
    slack = score_tolerance(scores, terms).double().clamp_min(record.floor.score)
    misplaced = (chosen & (scores < threshold - slack)) | (~chosen & visible & (scores > threshold + slack))
    best = torch.zeros_like(chosen).scatter(
        1, scores.argsort(dim=1, descending=True, stable=True), _first(count, chosen)
    )
    return _iou(chosen, best & visible), int(misplaced.sum())


def _first(count: Tensor, like: Tensor) -> Tensor:
    return torch.arange(like.shape[1], device=like.device) < count


def logical_rows(record: Record, physical: Tensor) -> Tensor:
    """Logical tokens of cache rows: int64 ``[Sq, K]``; -1 for unused slots, -2 for rows of nobody's page."""
    page, length = record.inputs.pool.page_size, int(record.inputs.kv_seq_lens[0])
    table = record.inputs.block_table[0, : -(-length // page)].long()
    pages = table if record.page_ids is None else record.page_ids.long()[table]
    ordered, block = pages.sort()
    wanted = physical.long().clamp_min(0) // page
    place = torch.searchsorted(ordered, wanted).clamp_max(len(ordered) - 1)
    known = ordered[place] == wanted
    logical = block[place] * page + physical.long().clamp_min(0) % page
    return torch.where(physical < 0, -1, torch.where(known, logical, -2))


def overlaps(a: Tensor, b: Tensor, length: int) -> list[float]:
    """IoU of two selections ``[Sq, K]``, query by query; entries that lead nowhere count against it."""
    stray = (a < -1) | (a >= length)
    return [
        iou if not lost else iou * len(row[row >= 0]) / (len(row[row >= 0]) + lost)
        for iou, lost, row in zip(
            _iou(selected_tokens(a, length), selected_tokens(b, length)), stray.sum(1).tolist(), a, strict=True
        )
    ]


def _iou(a: Tensor, b: Tensor) -> list[float]:
    shared, either = (a & b).sum(1), (a | b).sum(1)
    return [1.0 if not total else float(count / total) for count, total in zip(shared, either, strict=True)]


def _read_findings(record: Record, read: Tensor, others: Sequence[Record], least: float) -> list[str]:
    findings = [f"the kernel read other rows than the selection names: overlap {least:.2f}"]
    stray = int((read == -2).sum())
    if stray:
        findings.append(f"{stray} rows it read belong to none of the request's pages")
    for other in others:
        selection = other.inputs.selection
        same_shape = selection is not None and selection[0].shape[0] == read.shape[0]
        if selection is not None and same_shape:
            length = max(int(record.inputs.kv_seq_lens[0]), int(other.inputs.kv_seq_lens[0]))
            if min(overlaps(read, selection[0], length)) == 1:
                findings.append(f"it read the selection of {group_name(other)}, not that of {group_name(record)}")
                break
    return findings


def group_name(record: Record) -> str:
    """How findings call a record's index group."""
    return f"layer {record.layer}" if record.index_group is None else f"index group {record.index_group}"
