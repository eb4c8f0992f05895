"""Run one stage as a process with a time limit, and read what it left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from integration.gpu.stage import FULL, TINY

KILLED_S = 10.0
"""Seconds that a killed process may take to go; one that waits for a dead GPU may never do."""

LAST_LINES = 20


class Status(StrEnum):
    """How a stage ended."""

    PASSED = "passed"
    FAILED = "failed"
    TIMED_OUT = "timed out"
    NOT_RUN = "not run"


@dataclass(frozen=True)
class Stage:
    """One part of the check.

    Attributes:
        name: what it is called in the result.
        module: has ``run(record, *, tiny)``.
        limit_s: seconds after which it is stopped, with every process it started.
        needs_cuda: has nothing to do without a GPU.
    """

    name: str
    module: str
    limit_s: float
    needs_cuda: bool


@dataclass(frozen=True)
class StageResult:
    """What became of a stage; ``reason`` is empty where it passed, ``facts`` and ``checks`` are as it recorded them."""

    name: str
    status: Status
    reason: str
    seconds: float
    limit_s: float
    facts: dict[str, Any]
    checks: list[dict[str, Any]]


def not_run(stage: Stage, reason: str) -> StageResult:
    """The result of a stage that was not started."""
    return StageResult(stage.name, Status.NOT_RUN, reason, 0.0, stage.limit_s, {}, [])


def run_stage(stage: Stage, folder: Path, environment: Mapping[str, str], *, tiny: bool) -> StageResult:
    """Run a stage to its end or its limit; its record and its output go to ``folder``."""
    path, output = folder / f"{stage.name}.json", folder / f"{stage.name}.log"
    command = (sys.executable, "-m", "integration.gpu.stage", stage.module, str(path), TINY if tiny else FULL)
    started = time.monotonic()
    with output.open("wb") as log:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
        )
    code = _wait(process, stage.limit_s)
    seconds = time.monotonic() - started
    recorded = json.loads(path.read_text()) if path.exists() else {"facts": {}, "checks": []}
    status, reason = _judge(code, recorded, stage.limit_s, output)
    return StageResult(stage.name, status, reason, round(seconds, 1), stage.limit_s, **recorded)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    """The exit status; None where the limit passed first, or Ctrl-C came. Nothing of its session is left behind."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILLED_S)


def _judge(code: int | None, recorded: Mapping[str, Any], limit_s: float, output: Path) -> tuple[Status, str]:
    if code is None:
        return Status.TIMED_OUT, f"stopped after {limit_s:g} s"
    if code != 0:
        last = output.read_text(errors="replace").splitlines()[-LAST_LINES:]
        return Status.FAILED, "\n".join([f"exit status {code}", *last])
    problems = [f"{check['name']}: {check['problem']}" for check in recorded["checks"] if check["problem"]]
    if problems:
        return Status.FAILED, "\n".join(problems)
    if not (recorded["facts"] or recorded["checks"]):
        return Status.FAILED, "recorded nothing"
    return Status.PASSED, ""
