"""The property tests of the policy, the remap and the fused form, with their kernels compiled for this GPU.

``tests/conftest.py`` gives compiled kernels few examples a test, as nearly each one is compiled anew (1 to 2 s of one
core). So the tests are spread over all cores: by pytest-xdist, or, without it, one process a file.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from integration.gpu import pytest_log
from integration.gpu.facts import REPOSITORY
from integration.gpu.record import Record

FOLDERS = ("tests/topology", "tests/remap", "tests/fused")
TINY_FILES = ("tests/remap/test_remap_torch_ops.py",)
NOT_HERE = "not numba_ops"
"""The numba forms run on CPUs."""

POLL_S = 0.5
MOST_FAILURES = 20
LAST_CHARACTERS = 1500
NOTHING_COLLECTED = 5


def run(record: Record, *, tiny: bool) -> None:
    files = TINY_FILES if tiny else sorted(_files())
    commands = commands_for(files, os.cpu_count() or 1, spread=find_spec("xdist") is not None)
    record.fact("processes", len(commands) if len(commands) > 1 else _workers(commands[0]))
    log = record.path.with_suffix(".tests")
    log.touch()
    environment = os.environ | {pytest_log.VARIABLE: str(log)}
    running = [subprocess.Popen(command, cwd=REPOSITORY, env=environment) for command in commands]
    while any(process.poll() is None for process in running):
        time.sleep(POLL_S)
        _note(record, log)
    _note(record, log)
    codes = {process.returncode for process in running} - {NOTHING_COLLECTED}
    record.check("tests passed", lambda: _require_success(record, codes))


def commands_for(files: Sequence[str], cores: int, *, spread: bool) -> list[list[str]]:
    """The pytest runs: one that spreads tests over all cores, or one for each file."""
    pytest = [sys.executable, "-m", "pytest", "-p", pytest_log.__name__, "-p", "no:cacheprovider"]
    pytest += ["--continue-on-collection-errors", "-k", NOT_HERE]
    if spread and len(files) > 1:
        return [[*pytest, "--numprocesses", str(cores), "--dist", "worksteal", *files]]
    return [[*pytest, file] for file in files]


def _workers(command: Sequence[str]) -> int:
    return int(command[command.index("--numprocesses") + 1]) if "--numprocesses" in command else 1


def _files() -> list[str]:
    return [str(path.relative_to(REPOSITORY)) for folder in FOLDERS for path in (REPOSITORY / folder).glob("test_*.py")]


def _note(record: Record, log: Path) -> None:
    """Counts and failures so far; the last line may be half written."""
    lines = log.read_text().split("\n")[:-1]
    tests = [json.loads(line) for line in lines]
    record.fact("tests", dict(Counter(test["outcome"] for test in tests)))
    failures = [test for test in tests if test["outcome"] == "failed"]
    record.fact(
        "failures",
        [{"test": test["test"], "problem": test["problem"][-LAST_CHARACTERS:]} for test in failures[:MOST_FAILURES]],
    )


def _require_success(record: Record, codes: set[int]) -> None:
    tests, failures = record.facts["tests"], record.facts["failures"]
    assert isinstance(tests, dict)
    assert isinstance(failures, list)
    names = ", ".join(failure["test"] for failure in failures)
    assert not failures, f"{tests['failed']} failed: {names}"
    assert codes <= {0}, f"pytest ended with {sorted(codes)}"
    assert tests.get("passed"), "no test ran"
