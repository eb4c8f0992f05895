"""How ``python -m integration.parity`` sets the stage; ``make parity`` runs the comparison itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from integration.parity import __main__, source_in_use
from integration.vllm_source import SourceError

REPOSITORY = Path(__file__).resolve().parents[2]


def test_environment_puts_the_fetched_tree_first() -> None:
    found = source_in_use.parity_environment(Path("/fetched"), {"PYTHONPATH": "/mine", "HOME": "/home"})
    assert found["PYTHONPATH"].split(os.pathsep) == ["/fetched", "/mine"]
    assert (found["HOME"], found["CUDA_VISIBLE_DEVICES"], found["TRITON_INTERPRET"]) == ("/home", "", "1")
    assert source_in_use.parity_environment(Path("/fetched"), {})["PYTHONPATH"] == "/fetched"


def test_plain_pytest_leaves_the_comparison_out() -> None:
    command = (sys.executable, "-m", "pytest", "--collect-only", "integration/parity")
    environment = {name: value for name, value in os.environ.items() if name != source_in_use.VARIABLE}
    found = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
    assert found.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, found.stdout + found.stderr


def test_refuses_the_installed_vllm(tmp_path: Path) -> None:
    """A process that imports another vLLM than the fetched one would compare the plugin with something else."""
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm/__init__.py").touch()
    check = "from integration.parity import source_in_use; source_in_use.require()"
    for root, status in ((tmp_path, 0), (tmp_path / "other", 1)):
        environment = {**os.environ, "PYTHONPATH": str(tmp_path), source_in_use.VARIABLE: str(root)}
        command = (sys.executable, "-c", check)
        found = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False)
        assert found.returncode == status, found.stderr
        assert ("not the fetched source; run 'make parity'" in found.stderr) is bool(status)


def test_says_so_when_the_source_cannot_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(version: str) -> None:
        raise SourceError(version, "found", "cure")

    monkeypatch.setattr(__main__, "fetch_source", fail)
    found = CliRunner().invoke(__main__.app, ["0.32.0"])
    assert (found.exit_code, found.stderr) == (1, "error: vLLM 0.32.0: found; cure\n")
