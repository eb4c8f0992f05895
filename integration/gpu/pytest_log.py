"""A pytest plugin that writes each test's outcome down at once: what a run that is stopped has found is not lost.

Loaded with ``-p integration.gpu.pytest_log``; the file's name is in the environment.
"""

from __future__ import annotations

import json
import os

import pytest

VARIABLE = "KVPLUGIN_GPU_CHECK_LOG"


def pytest_configure(config: pytest.Config) -> None:
    # Workers of pytest-xdist report to the process that started them, which writes.
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Log(os.environ[VARIABLE]), "kvplugin-gpu-check-log")


class _Log:
    def __init__(self, path: str) -> None:
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - as long as the session

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._write(report.nodeid, "failed", report.longreprtext)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        # A test counts once: by its call, or by the set-up or tear-down that kept it from passing.
        if report.when == "call" or not report.passed:
            self._write(report.nodeid, report.outcome, report.longreprtext if report.failed else "")

    def pytest_unconfigure(self) -> None:
        self._file.close()

    def _write(self, test: str, outcome: str, problem: str) -> None:
        self._file.write(json.dumps({"test": test, "outcome": outcome, "problem": problem}) + "\n")
