"""Run one version's checks in a process of its own, and read what became of each."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
CHECKS = ("tests/vllm_contract", "integration/parity")


class Outcome(StrEnum):
    """What became of one check."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_APPLICABLE = "not applicable"


class Check(NamedTuple):
    """One test, by the stem of its file and its name. ``reason``: why it does not apply, or how it failed."""

    file: str
    name: str
    outcome: Outcome
    reason: str = ""


class Run(NamedTuple):
    """The checks of one version; ``seconds`` they took, and pytest's exit status."""

    version: str
    checks: tuple[Check, ...]
    seconds: float
    status: int


def run_checks(version: str, environment: Mapping[str, str]) -> Run:
    """Run every check against the vLLM that the environment names."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = (sys.executable, "-m", "pytest", *CHECKS, f"--junitxml={report}", "-o", "junit_family=xunit2")
        status = subprocess.run(command, env=dict(environment), cwd=ROOT, check=False).returncode
        if not report.exists():
            return Run(version, (), 0.0, status or 1)
        return read_report(version, report.read_text(), status)


def read_report(version: str, xml: str, status: int) -> Run:
    """What a JUnit report says."""
    suite = next(ElementTree.fromstring(xml).iter("testsuite"))
    return Run(version, tuple(map(_check, suite.iter("testcase"))), float(suite.get("time", "0")), status)


def _check(case: ElementTree.Element) -> Check:
    file, name = case.get("classname", "").rpartition(".")[2], case.get("name", "")
    for tag, outcome in (
        ("failure", Outcome.FAILED),
        ("error", Outcome.FAILED),
        ("skipped", Outcome.NOT_APPLICABLE),
    ):
        found = case.find(tag)
        if found is not None:
            return Check(file, name, outcome, found.get("message", "").partition("\n")[0])
    return Check(file, name, Outcome.PASSED)
