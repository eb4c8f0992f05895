from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvplugin.cli.main import app, main

FILE = """
arms:
  control: {mode: observe}
  candidate: {mode: topology_sparse_merge}
default_arm: control
"""


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("KVPLUGIN_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    return tmp_path / "state"


@pytest.fixture
def file(tmp_path: Path) -> str:
    (tmp_path / "rollout.yaml").write_text(FILE)
    return str(tmp_path / "rollout.yaml")


def run(*arguments: str) -> tuple[int, str]:
    found = CliRunner().invoke(app, ["rollout", *arguments])
    return found.exit_code, found.output


def shown(*arguments: str) -> dict[str, Any]:
    code, output = run(*arguments, "--json")
    assert code == 0, output
    return dict(json.loads(output))


def failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
    monkeypatch.setattr("sys.argv", ["kvplugin", "rollout", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    return capsys.readouterr().err.strip()


def shares(view: dict[str, Any]) -> dict[str, float]:
    return {name: arm["share"] for name, arm in view["arms"].items()}


def test_a_canary_from_nothing_to_all_and_back(file: str) -> None:
    assert shares(shown("show", "--file", file)) == {"control": 1, "candidate": 0}
    assert shares(shown("set", "candidate=0.05", "--file", file, "--note", "go")) == {
        "control": 0.95,
        "candidate": 0.05,
    }
    off = shown("disable", "--file", file)
    assert not off["enabled"]
    assert off["override"]["note"] == "go", "what another command set stays"
    assert shares(off) == {"control": 0.95, "candidate": 0.05}
    assert shown("enable", "--file", file)["enabled"]
    assert shares(shown("set", "candidate=1", "--file", file)) == {"control": 0, "candidate": 1}
    assert shown("clear", "--file", file)["override"] == {}


def test_what_people_see(file: str) -> None:
    run("disable", "--file", file, "--note", "alarm")
    code, output = run("show", "--file", file)
    assert code == 0
    for part in ("SWITCHED OFF", "alarm", "control (default)", "topology_sparse_merge", "override of enabled"):
        assert part in output


def test_a_bad_override_is_shown_and_can_be_cleared(file: str, state: Path) -> None:
    shown("disable", "--file", file)
    (path,) = state.glob("*.json")
    path.write_text('{"shares": {"ghost": 1}}')
    assert "ghost" in shown("show", "--file", file)["problem"]
    assert shown("clear", "--file", file)["problem"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("set", "ghost=1"), "rollout.shares.ghost: unknown arm; use control, candidate"),
        (("set", "candidate=0.7", "control=0.7"), "rollout.shares: add up to 1.4; make them add up to 1"),
    ],
)
def test_what_does_not_fit_changes_nothing(
    arguments: tuple[str, ...],
    message: str,
    file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert failure(capsys, monkeypatch, *arguments, "--file", file) == f"error: {message}"
    assert shown("show", "--file", file)["override"] == {}


@pytest.mark.parametrize(
    "arguments",
    [
        ("show",),
        ("show", "--file", "a", "--url", "http://b"),
        ("set", "candidate", "--file", "a"),
        ("set", "candidate=2", "--file", "a"),
        ("set", "candidate=x", "--file", "a"),
        ("set", "a=0.1", "a=0.2", "--file", "a"),
        ("validate", "/nowhere.yaml"),
        ("compare", "--prometheus", "http://a", "--window", "soon"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...]) -> None:
    code, output = run(*arguments)
    assert code == 2, output


def test_a_file_that_is_not_there(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    found = failure(capsys, monkeypatch, "show", "--file", "/nowhere.yaml")
    assert found == "error: /nowhere.yaml: No such file or directory; give a readable rollout file"


def test_a_state_that_cannot_be_written(
    file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "plain").write_text("")
    state = str(tmp_path / "plain" / "override.json")
    found = failure(capsys, monkeypatch, "disable", "--file", file, "--state", state)
    assert found.endswith("make it writable, or name another with --state")


def test_validate_says_all_that_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("arms: {a: {mode: nope}}\nshares: {a: 2}")
    found = failure(capsys, monkeypatch, "validate", str(path))
    assert "rollout.arms.a.mode: 'nope' is unknown" in found
    assert "rollout.shares.a: 2 is not valid" in found
    path.write_text("arms: {a: {mode: topology_sparse_merge, sink_tokens: 40, local_tokens: 0}}")
    assert run("validate", str(path))[0] == 0
    assert "rollout.arms.a" in failure(capsys, monkeypatch, "validate", str(path), "--top-k", "64")
    assert run("validate", str(path), "--top-k", "2048", "--before-topk")[0] == 0


@pytest.mark.parametrize("arguments", [("show", "--url"), ("compare", "--prometheus")])
def test_nobody_answers(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = failure(capsys, monkeypatch, *arguments, "http://127.0.0.1:9")
    assert found.startswith("error: http://127.0.0.1:9: ")
    assert "Connection refused" in found
