"""``replay_capture``: every record of a capture, stage by stage, and where decode first stops matching."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from kvplugin import __version__
from kvplugin.errors import ArgumentError
from kvplugin.replay.capture.records import Capture, Record
from kvplugin.replay.compare import Comparison, compare
from kvplugin.replay.errors import CaptureFileError, IdentityError
from kvplugin.replay.inputs import CompareSettings
from kvplugin.replay.oracle import MergeOracle
from kvplugin.replay.report import CaptureReport, FirstDrift, RecordReport, Stage, StageReport, Status
from kvplugin.replay.stages.attention import attention_stage, drift_by_position, log_prob_stage, selected_blocks
from kvplugin.replay.stages.cache import cache_stage, identity_stage
from kvplugin.replay.stages.check_record import check_record
from kvplugin.replay.stages.selection import indexer_stage, selection_stage


def replay_capture(
    capture: Capture,
    *,
    strict: bool = False,
    split_size: int | None = None,
    oracles: Sequence[MergeOracle] | None = None,
) -> CaptureReport:
    """Replay every record and report each stage.

    Args:
        strict: the engine's output and log-sum-exp must equal the replay's bit for bit.
        split_size: see :class:`CompareSettings`.
        oracles: see :func:`compare`.

    Raises:
        CaptureFileError: a record's tensors are malformed, so that nothing can be said about it.
    """
    peers: dict[tuple[str, int], list[Record]] = defaultdict(list)
    for record in capture.records:
        peers[record.request, record.step].append(record)
    ordered = sorted(capture.records, key=lambda record: (record.step, record.layer, record.request))
    reports = []
    for record in ordered:
        others = [other for other in peers[record.request, record.step] if other.layer != record.layer]
        settings = CompareSettings(split_size, strict, record.floor, record.backend)
        reports.append(_record_report(record, others, settings, oracles))
    first = _first_drift(reports)
    return CaptureReport(
        kvplugin=__version__,
        engine=capture.engine,
        model=capture.model,
        policy=capture.policy,
        within=first is None,
        first_drift=first,
        records=reports,
    )


def _record_report(
    record: Record, others: Sequence[Record], settings: CompareSettings, oracles: Sequence[MergeOracle] | None
) -> RecordReport:
    try:
        comparison = compare(record.inputs, record.observed, settings, oracles)
        check_record(record)
        stages = _stages(record, others, comparison)
    except IdentityError as error:
        return _refused(record, error)
    except ArgumentError as error:
        raise CaptureFileError(
            record.place, " ".join(str(error).split())[:400], "the record cannot be replayed"
        ) from None
    return RecordReport(
        request=record.request,
        layer=record.layer,
        step=record.step,
        positions=record.positions,
        stages=stages,
        comparison=comparison.report,
        selected_blocks=selected_blocks(record),
        **drift_by_position(record, comparison.replayed),
    )


def _stages(record: Record, others: Sequence[Record], comparison: Comparison) -> list[StageReport]:
    return [
        identity_stage(record, comparison.report.fingerprints[0]),
        cache_stage(record),
        indexer_stage(record),
        selection_stage(record, others),
        attention_stage(record, others, comparison),
        log_prob_stage(record, comparison),
    ]


def _refused(record: Record, error: IdentityError) -> RecordReport:
    stages = [StageReport(stage=Stage.IDENTITY, status=Status.DRIFT, findings=[str(error)])]
    stages += [
        StageReport(stage=stage, status=Status.UNAVAILABLE, reason="the identity stage refused the record")
        for stage in list(Stage)[1:]
    ]
    return RecordReport(
        request=record.request,
        layer=record.layer,
        step=record.step,
        positions=record.positions,
        stages=stages,
        comparison=None,
        selected_blocks=[],
        position_drift=[],
        position_share=[],
    )


def _first_drift(reports: Sequence[RecordReport]) -> FirstDrift | None:
    """By step, then layer, then stage, over all requests: drift travels that way."""
    for report in reports:
        stage = report.first_drift
        if stage is not None:
            return FirstDrift(
                stage=stage.stage,
                request=report.request,
                layer=report.layer,
                step=report.step,
                position=_position(report, stage),
                findings=stage.findings,
            )
    return None


def _position(report: RecordReport, stage: StageReport) -> int:
    """Position of the query token that drifted most in this stage; the first one where the stage has no queries."""
    for drift in stage.drifts:
        if not drift.within and drift.worst and "query" in drift.worst:
            return report.positions[drift.worst["query"]]
    if stage.iou and min(stage.iou) < 1:
        return report.positions[stage.iou.index(min(stage.iou))]
    return report.positions[0]
