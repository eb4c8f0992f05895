"""The GPU check, tried without a GPU: its stages on the CPU, its limits and its failures with stages made for that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from integration.gpu import check, correctness, graphs, operators, page, races, requirements, steps, timings
from integration.gpu.batches import Shape
from integration.gpu.runner import KILLED_S, Stage, Status
from kvplugin.fused import op as fused_op
from kvplugin.fused import separate
from kvplugin.remap import op as remap_op
from kvplugin.remap import torch_ops as remap_in_torch
from kvplugin.topology import op as topology_op
from kvplugin.topology import torch_ops as policy_in_torch

REPOSITORY = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
SMALL = Shape(7, 64, 300)


def test_dry_run(tmp_path: Path) -> None:
    """Through the script, as on a GPU machine: from another folder, with a Python of one's choice."""
    environment = os.environ | {"PYTHON": sys.executable}
    command = (str(REPOSITORY / "integration/gpu/check.sh"), "found.json", "--dry-run")
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stdout + found.stderr
    report = json.loads((tmp_path / "found.json").read_text())
    assert report.keys() == {"format", "dry_run", "passed", "seconds", "stages"}
    assert (report["format"], report["dry_run"], report["passed"]) == (check.FORMAT, True, True)
    stages = {stage["name"]: stage for stage in report["stages"]}
    assert list(stages) == [stage.name for stage in check.STAGES]
    for stage in check.STAGES:
        entry = stages[stage.name]
        assert entry.keys() == {"name", "status", "reason", "seconds", "limit_s", "facts", "checks"}
        wanted = ("not run", "no CUDA device") if stage.needs_cuda else ("passed", "")
        assert (entry["status"], entry["reason"]) == wanted
        assert stage.name in found.stdout
    assert stages["facts"]["facts"]["card"] is None
    assert stages["facts"]["facts"]["torch"] == torch.__version__
    assert stages["correctness"]["facts"]["tests"]["passed"] > 0
    assert page.page(report).count("no CUDA device") == 4


def test_limits_together_leave_time_for_the_rest_of_eight_minutes() -> None:
    assert sum(stage.limit_s for stage in check.STAGES) <= 470


STAGES = {
    "good": "record.fact('answer', 42)\n    record.check('sum', lambda: None)",
    "broken": "record.fact('answer', 42)\n    raise RuntimeError('the cause')",
    "wrong": "def compare():\n        assert not 1, 'row 3 differs'\n    record.check('compare', compare)",
    "silent": "pass",
    "cardless": "record.fact('card', None)",
    "endless": (
        "record.fact('answer', 42)\n    import subprocess, time\n"
        "    record.fact('child', subprocess.Popen(['sleep', '600']).pid)\n    time.sleep(600)"
    ),
}


@pytest.fixture
def run_stages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, dict[str, Any], str]]:
    """Exit status, report and output of a check of stages made up here."""
    for name, body in STAGES.items():
        (tmp_path / f"stage_{name}.py").write_text(f"def run(record, *, tiny):\n    {body}\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(REPOSITORY), str(tmp_path))))

    def run(*names: str, limit_s: float = 60.0, needs_cuda: bool = False, dry: bool = True) -> Any:
        stages = [Stage(name, f"stage_{name}", limit_s, needs_cuda) for name in names]
        path = tmp_path / "found.json"
        code = check.main([str(path), *(["--dry-run"] if dry else [])], stages)
        return code, json.loads(path.read_text()), capfd.readouterr().out

    return run


@pytest.mark.parametrize(
    ("name", "reason"),
    [("broken", "RuntimeError: the cause"), ("wrong", "compare: row 3 differs"), ("silent", "recorded nothing")],
)
def test_a_failing_stage_is_named_and_the_others_run(run_stages: Any, name: str, reason: str) -> None:
    code, report, output = run_stages(name, "good")
    failed, good = report["stages"]
    assert code == 1
    assert not report["passed"]
    assert (failed["name"], failed["status"]) == (name, Status.FAILED)
    assert failed["reason"].splitlines()[-1] == reason
    assert (good["status"], good["facts"], good["checks"][0]["name"]) == (Status.PASSED, {"answer": 42}, "sum")
    assert output.startswith(f"{name} ")
    assert reason in output
    assert "FAILED in" in output


def test_a_stage_over_its_limit_is_stopped_with_what_it_started(run_stages: Any) -> None:
    started = time.monotonic()
    code, report, output = run_stages("endless", "good", limit_s=2.0)
    slow, good = report["stages"]
    assert time.monotonic() - started < 2 * (2 + KILLED_S)
    assert code == 1
    assert (slow["status"], slow["reason"], slow["facts"]["answer"]) == (Status.TIMED_OUT, "stopped after 2 s", 42)
    assert good["status"] == Status.PASSED
    assert "timed out" in output
    state = Path(f"/proc/{slow['facts']['child']}/stat")
    assert not state.exists() or state.read_text().split()[2] == "Z"


def test_a_real_run_needs_a_gpu(run_stages: Any) -> None:
    code, report, _ = run_stages("good", dry=False)
    assert (code, report["passed"], report["dry_run"]) == (0, True, False)
    code, report, _ = run_stages("cardless", "good", dry=False)
    assert (code, report["passed"]) == (1, False)
    assert [stage["status"] for stage in report["stages"]] == [Status.PASSED, Status.NOT_RUN]


def test_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    message = requirements.complaint(lambda module: None if module == "pydantic" else module)
    assert message is not None
    assert f"{sys.executable} has no pydantic>=2.10,<3;" in message
    assert "-m pip install 'pydantic>=2.10,<3'\n" in message
    assert requirements.complaint() is None
    monkeypatch.setattr(check, "complaint", lambda: message)
    assert check.main([]) == 1
    assert capsys.readouterr() == ("", message + "\n")


SCENARIOS = (
    graphs.policy_follows,
    graphs.lift_follows,
    graphs.remap_follows,
    graphs.fused_follows,
    graphs.relaunches_are_equal,
    graphs.rows_stand_alone,
)


@pytest.fixture
def torch_forms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forms that need no compiler: what is tried here is the check."""
    monkeypatch.setattr(topology_op, "implementation_for", lambda device_type: policy_in_torch)
    monkeypatch.setattr(remap_op, "implementation_for", lambda device_type: remap_in_torch)
    monkeypatch.setattr(fused_op, "implementation_for", lambda device_type: separate)


@pytest.mark.usefixtures("torch_forms")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenarios_hold_on_the_cpu(scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "BATCHES", (1, 6, 7))
    scenario(SMALL, CPU)


@pytest.mark.usefixtures("torch_forms")
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_scenarios_can_fail(scenario: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that reads a little of what the last launch left, as a wrongly captured one would."""
    launches = 0

    def spoiled(real: Callable[..., object]) -> Callable[..., object]:
        def call(first: Tensor, *others: Any, **options: Any) -> object:
            nonlocal launches
            launches += 1
            result = real(first, *others, **options)
            target = options.get("out", first)
            target[(0,) * target.dim()] = launches
            return result

        return call

    monkeypatch.setattr(graphs, "BATCHES", (1, 6, 7))
    for name in ("apply_topology_policy", "remap_grouped", "apply_and_remap"):
        monkeypatch.setattr(steps, name, spoiled(getattr(steps, name)))
    monkeypatch.setattr(graphs, "lift_structural_scores", spoiled(graphs.lift_structural_scores))
    with pytest.raises(AssertionError, match=r"\[\d.*\]: .+, expected .+ \(\d+ of \d+ differ\)"):
        scenario(SMALL, CPU)


@pytest.mark.usefixtures("torch_forms")
def test_races_are_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "REPEATS", 2)
    rows = races.draw_rows(Shape(3, 64, 300), CPU)
    for params in {races.policy_with(witness, 64) for _, witness in races.CASES}:
        races.policy_never_changes(rows, params)
        races.fused_never_changes(rows, params)
    launches = iter(range(10))
    with pytest.raises(AssertionError, match=r"launch 1\[0\]: 1, expected 0"):
        races._repeat(lambda topk: (torch.tensor([next(launches)]),), torch.zeros(1))


@pytest.mark.usefixtures("torch_forms")
def test_operators_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = operators.arguments_on(CPU)
    assert set(arguments) == {"topology_policy", "lift_structural_scores", "remap_grouped", "policy_and_remap"}
    operators.check_operator("policy_and_remap", arguments["policy_and_remap"])
    monkeypatch.setattr(remap_in_torch, "remap_into", lambda call: call.topk.zero_())
    with pytest.raises(Exception, match="mutat"):
        operators.check_operator("remap_grouped", arguments["remap_grouped"])


@pytest.mark.usefixtures("torch_forms")
def test_every_contestant_runs() -> None:
    for rows in (1, timings.TOPK_ROWS):
        contestants = timings.Step(Shape(rows, 64, 300), 2, CPU).contestants()
        for contestant in contestants.values():
            contestant.restore()
            contestant.step(1)
    assert len(contestants) == 10


def test_aims_name_contestants() -> None:
    names = {name for rows in timings.ROWS for name in timings.Step(Shape(rows, 64, 300), 1, CPU).contestants()}
    assert {name for aim in timings.AIMS for name in (aim.above, aim.below)} <= names
    found = timings.judged({"grouped remap, T=1": 3.0, "remap per layer, T=1": 10.0, "torch.topk, T=64": 1.0})
    assert found == [{"name": "grouped remap, T=1 / remap per layer, T=1", "ratio": 0.3, "at_most": 0.4, "met": True}]
    assert timings.judged(dict.fromkeys(names, 1.0))[2]["met"] is False


def test_tests_are_spread_over_the_cores() -> None:
    files = correctness._files()
    assert {Path(file).parent.as_posix() for file in files} == set(correctness.FOLDERS)
    (together,) = correctness.commands_for(files, 16, spread=True)
    assert together[-len(files) - 4 : -len(files)] == ["--numprocesses", "16", "--dist", "worksteal"]
    apart = correctness.commands_for(files, 16, spread=False)
    assert [command[-1] for command in apart] == files


def test_page_has_the_headings_of_the_document() -> None:
    document = (REPOSITORY / "docs/gpu-results.md").read_text()
    for title, headings in page.HEADINGS.items():
        assert f"### {title}\n\n| {' | '.join(headings)} |\n" in document
    for stage in check.STAGES:
        assert f"| {stage.name} | {stage.limit_s:g} |" in document


def test_page_of_a_result() -> None:
    medians = {"grouped remap, T=1": 5.0, "remap per layer, T=1": 10.0}
    times = {"medians_us": medians, "aims": timings.judged(medians)}
    stage = {"name": "timings", "status": "passed", "reason": "", "seconds": 1, "facts": times, "checks": []}
    text = page.page({"stages": [stage]})
    assert "| grouped remap, T=1 | 5.00 |" in text
    assert "| grouped remap, T=1 / remap per layer, T=1 | 0.500 | 0.4 | missed |" in text
