"""The built-in cases: honest captures must replay clean, and every fault must be named. Needs no engine and no file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from kvplugin.replay.capture.records import Capture
from kvplugin.replay.report import CaptureReport
from kvplugin.replay.rope import RopeState
from kvplugin.replay.selftest.faults import FAULTS, GQA, MLA, Fault
from kvplugin.replay.selftest.synthetic import Shape, make_capture
from kvplugin.replay.stages.capture_report import replay_capture

HONEST = {
    "grouped-query, context parallel": GQA,
    "sparse MLA": MLA,
    "several queries": Shape(queries=5, world=3),
    "pre-RoPE keys": Shape(k_state=RopeState.PRE),
    "bfloat16 32 heads": Shape(heads=32, kv_heads=8, dim=128, dtype=torch.bfloat16, q_dtype=torch.bfloat16),
    "positions from 4096": Shape(offset=4096),
}


class SelftestCase(NamedTuple):
    """One case, and what is wrong with how it came out; empty = right."""

    name: str
    problem: str
    seen: str


def run_selftest() -> Iterator[SelftestCase]:
    """Every case, in order."""
    for name, shape in HONEST.items():
        report = replay_capture(make_capture(shape))
        problem = "" if report.within else f"drifted: {report.first_drift}"
        yield SelftestCase(f"honest: {name}", problem, "no drift")
    for fault in FAULTS:
        bad, other = fault.records()
        yield _fault_case(fault, replay_capture(Capture("selftest", "random", (bad, other))))


def _fault_case(fault: Fault, report: CaptureReport) -> SelftestCase:
    first = report.first_drift
    stage = first.stage if first else None
    findings = [text for record in report.records for each in record.stages for text in each.findings]
    seen = next((text for text in findings if fault.named and fault.named in text), "no drift")
    problem = ""
    if stage is not fault.stage:
        problem = f"seen at {stage}, expected {fault.stage}"
    elif fault.named and seen == "no drift":
        problem = f"not named; findings: {'; '.join(findings)}"
    return SelftestCase(f"fault: {fault.name}", problem, seen)
