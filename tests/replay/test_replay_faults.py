"""Each fault put into a good capture is named by the report, read from files; what must not drift does not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kvplugin.replay import (
    Capture,
    CaptureReport,
    FreshCache,
    RopeState,
    Stage,
    Status,
    read_capture,
    replay_capture,
    with_floor,
    write_capture,
)
from kvplugin.replay.capture.records import Record
from kvplugin.replay.selftest.faults import FAULTS, GQA, MLA, Fault, dropped_key
from kvplugin.replay.selftest.run import HONEST, run_selftest
from kvplugin.replay.selftest.synthetic import Shape, make_capture, make_record

THE_TEN = {
    "page order permuted",
    "one page holds another's content",
    "one key rotated for a wrong position",
    "k cast through q's dtype",
    "base-2 LSE from one rank",
    "one context-parallel owner changed",
    "prefix altered under the same key",
    "newest key dropped",
    "scale off by the RoPE dimensions",
    "selection of another group",
}


def report_of(tmp_path: Path, *records: Record) -> CaptureReport:
    write_capture(Capture("engine", "model", records), tmp_path / "capture")
    return replay_capture(read_capture(tmp_path / "capture"))


def findings(report: CaptureReport) -> list[str]:
    return [text for record in report.records for stage in record.stages for text in stage.findings]


def stage(report: CaptureReport, name: Stage, record: int = 0) -> Status:
    return next(each.status for each in report.records[record].stages if each.stage is name)


def test_all_faults_are_there() -> None:
    assert {fault.name for fault in FAULTS} >= THE_TEN


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_named(fault: Fault, seed: int, tmp_path: Path) -> None:
    bad, other = fault.records(seed)
    report = report_of(tmp_path, bad, other)
    first = report.first_drift
    if fault.stage is None:
        assert report.within, first
        assert findings(report) == []
        return
    assert first is not None
    assert (first.stage, first.request, first.layer, first.step) == (fault.stage, "r0", 0, 0)
    assert first.position == bad.positions[0]
    assert any(fault.named in text for text in findings(report)), findings(report)
    assert all(each.status is not Status.DRIFT for each in report.records[1].stages), "the good record drifted"


@pytest.mark.parametrize(
    "fault", [each for each in FAULTS if each.stage is Stage.ATTENTION], ids=lambda each: each.name
)
def test_only_the_true_fault_is_named(fault: Fault, tmp_path: Path) -> None:
    reproduced = [text for text in findings(report_of(tmp_path, *fault.records())) if text.startswith("reproduced by")]
    assert len(reproduced) <= 1, reproduced


@pytest.mark.parametrize("shape", HONEST.values(), ids=HONEST)
def test_honest_captures_replay_clean(shape: Shape, tmp_path: Path) -> None:
    write_capture(make_capture(shape, layers=2, steps=2), tmp_path / "capture")
    report = replay_capture(read_capture(tmp_path / "capture"))
    assert report.within, report.first_drift
    assert all(each.status is not Status.DRIFT for record in report.records for each in record.stages)


def test_the_selftest_passes() -> None:
    cases = list(run_selftest())
    assert len(cases) == len(HONEST) + len(FAULTS)
    assert [case for case in cases if case.problem] == []


def test_drift_is_reported_where_it_starts(tmp_path: Path) -> None:
    """By step, then layer: what comes after follows from it."""
    records = [
        make_record(Shape(), seed=step * 10 + layer, layer=layer, step=step) for layer in (2, 0, 1) for step in (1, 0)
    ]
    bad = [dropped_key(each, each) if (each.layer, each.step) in ((2, 0), (0, 1)) else each for each in records]
    first = report_of(tmp_path, *bad).first_drift
    assert first is not None
    assert (first.step, first.layer, first.stage, first.position) == (0, 2, Stage.ATTENTION, 89)


def test_an_unexplained_drift_is_not_explained(tmp_path: Path) -> None:
    record = make_record(Shape())
    assert record.observed.out is not None
    strange = replace(record, observed=replace(record.observed, out=record.observed.out + 0.01))
    report = report_of(tmp_path, strange)
    assert report.first_drift is not None
    assert findings(report) == ["out, engine vs replay: 0.01, tolerance " + findings(report)[0].split("tolerance ")[1]]


def test_a_floor_of_two_honest_runs(tmp_path: Path) -> None:
    record = make_record(Shape())
    assert record.observed.out is not None
    again = replace(record, observed=replace(record.observed, out=record.observed.out + 0.01))
    noisy = with_floor(record, again)
    assert noisy.floor.out == pytest.approx(0.01, rel=1e-4)
    assert (noisy.floor.lse, noisy.floor.log_prob) == (0, 0)
    third = replace(record, observed=replace(record.observed, out=record.observed.out - 0.009), floor=noisy.floor)
    assert report_of(tmp_path / "third", third).within
    beyond = replace(third, observed=replace(record.observed, out=record.observed.out + 0.011))
    assert not report_of(tmp_path / "beyond", beyond).within


def test_log_probabilities_that_differ(tmp_path: Path) -> None:
    record = make_record(Shape())
    assert record.log_probs is not None
    report = report_of(tmp_path, replace(record, log_probs=record.log_probs - 0.01))
    assert stage(report, Stage.LOG_PROBS) is Status.DRIFT
    assert stage(report, Stage.ATTENTION) is Status.MATCH


def test_cached_values_that_a_fresh_prefill_would_not_cache(tmp_path: Path) -> None:
    record = make_record(GQA)
    assert record.fresh is not None
    assert record.fresh.values is not None
    values = record.fresh.values.clone()
    values[[17, 30], 1, 4] += 0.01
    report = report_of(tmp_path, replace(record, fresh=replace(record.fresh, values=values)))
    assert stage(report, Stage.CACHE) is Status.DRIFT
    assert findings(report) == ["values at position 17 and 1 more are not those of a fresh prefill"]


def test_a_fresh_key_that_is_not_finite(tmp_path: Path) -> None:
    record = make_record(GQA)
    assert record.fresh is not None
    keys = record.fresh.keys.clone()
    keys[17, 1, 4] = torch.inf
    report = report_of(tmp_path, replace(record, fresh=replace(record.fresh, keys=keys)))
    assert stage(report, Stage.CACHE) is Status.DRIFT
    assert findings(report)[0] == "keys at position 17 are not those of a fresh prefill"


def test_a_lost_latent_dimension(tmp_path: Path) -> None:
    record = make_record(MLA)
    assert record.fresh is not None
    keys = record.fresh.keys.clone()
    keys[5, 40] += 0.1
    report = report_of(tmp_path, replace(record, fresh=replace(record.fresh, keys=keys)))
    assert findings(report) == ["rope keys at position 5 are not those of a fresh prefill"]


def test_other_bits_alone_are_no_fault() -> None:
    """Two layers of one index group have one selection: neither it nor any other fault is to blame for rounding."""
    record = make_record(MLA)
    assert record.observed.out is not None
    off = replace(record, observed=replace(record.observed, out=record.observed.out.nextafter(torch.tensor(9.0))))
    report = replay_capture(Capture("engine", "model", (off, replace(record, layer=1))), strict=True)
    assert stage(report, Stage.ATTENTION) is Status.DRIFT
    assert not [text for text in findings(report) if "reproduced by" in text]


def test_a_key_that_is_not_the_one_the_step_wrote(tmp_path: Path) -> None:
    """Of a running engine the newest tokens' cache elements are known, not those of the whole request."""
    record = make_record(MLA)
    assert record.fresh is not None
    written = FreshCache(record.fresh.keys[-3:].clone())
    report = report_of(tmp_path / "good", replace(record, fresh=written))
    assert stage(report, Stage.CACHE) is Status.MATCH
    names = [drift.name for drift in report.records[0].stages[1].drifts]
    assert names == [
        f"{each}, cached vs what the step wrote for tokens from 87 on" for each in ("latents", "rope keys")
    ]
    written.keys[1, 40] += 0.1
    report = report_of(tmp_path / "bad", replace(record, fresh=written))
    assert findings(report) == ["rope keys at position 88 are not those that the step wrote"]


def test_what_is_missing_is_listed_with_a_reason() -> None:
    record = make_record(Shape())
    bare = replace(
        record,
        inputs=replace(record.inputs, head=None),
        observed=type(record.observed)(),
        fresh=None,
        log_probs=None,
        content=None,
        chunks=(),
    )
    report = replay_capture(Capture("engine", "model", (bare,)))
    reasons = {each.stage: (each.status, each.reason) for each in report.records[0].stages}
    assert report.within
    missing = (Stage.CACHE, Stage.INDEXER_SCORES, Stage.SELECTION, Stage.LOG_PROBS)
    assert all(reasons[name][0] is Status.UNAVAILABLE and reasons[name][1] for name in missing)
    assert "holds no output of the engine" in reasons[Stage.ATTENTION][1]


def test_ties_in_the_indexer_are_no_drift(tmp_path: Path) -> None:
    """Scores that are equal may be cut either way; a score far below the cut may not be selected."""
    record = make_record(MLA)
    assert record.indexer is not None
    assert record.selection_before is not None
    flat = replace(record.indexer, keys=record.indexer.keys * 0)
    tied = replace(
        record, indexer=flat, indexer_scores=torch.zeros(1, 90), selection_before=torch.arange(40, 64).view(1, -1)
    )
    assert stage(report_of(tmp_path / "tied", tied), Stage.SELECTION) is Status.MATCH
    worst = record.indexer_scores.argmin()  # type: ignore[union-attr]
    for slot in (0, -1):  # the best token lost, and the one at the cut
        selection = record.selection_before.clone()
        selection[0, slot] = worst
        report = report_of(tmp_path / f"wrong{slot}", replace(record, selection_before=selection))
        assert stage(report, Stage.SELECTION) is Status.DRIFT, slot
        (selected,) = [each for each in report.records[0].stages if each.stage is Stage.SELECTION]
        assert selected.iou == [pytest.approx(23 / 25)]


def test_rows_of_nobodys_page(tmp_path: Path) -> None:
    record = make_record(MLA)
    assert record.physical is not None
    stray = record.physical.clone()
    stray[0, 2] = 10_000
    report = report_of(tmp_path, replace(record, physical=stray))
    assert "1 rows it read belong to none of the request's pages" in findings(report)


def test_indexer_without_rotation(tmp_path: Path) -> None:
    from kvplugin.replay.stages.selection import indexer_scores

    record = make_record(MLA)
    assert record.indexer is not None
    plain = replace(record.indexer, rope=replace(record.indexer.rope, q_state=RopeState.POST, k_state=RopeState.POST))
    report = report_of(tmp_path, replace(record, indexer_scores=indexer_scores(record, plain)))
    assert "the scores come out without the indexer's rotation" in findings(report)
