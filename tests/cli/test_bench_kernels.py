"""``kvplugin bench kernels --static`` over two small kernels, one of which spills: what it prints and how it exits."""

from __future__ import annotations

import importlib.util
import json
import pickle
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from kvplugin.cli import bench_kernels
from kvplugin.cli.bench_kernels import GLM52, Launches, launches_of
from kvplugin.cli.main import app
from kvplugin.kernels.static import KernelFacts, KernelToolsError, KernelTraffic
from kvplugin.remap.layouts import layout_from_mask

COMMAND = ["bench", "kernels", "--static", "--arch", "90"]
FITS = KernelFacts("fits", 90, 4, 20, 0, 0, 32, 125)
SPILLS = KernelFacts("spills", 90, 4, 255, 120, 41, 0, 596)
TRAFFIC = KernelTraffic("remap, 1 member", 150, 50, 100, 96)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[KernelFacts]]:
    """What compilation finds, without the minute that it takes: tests/kernels compiles."""
    found = [FITS]
    monkeypatch.setattr(bench_kernels, "kernel_facts", lambda modules, archs: tuple(found))
    monkeypatch.setattr(bench_kernels, "kernel_traffic", lambda: (TRAFFIC,))
    return found


def test_json(compiled: list[KernelFacts]) -> None:
    found = CliRunner().invoke(app, [*COMMAND, "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    assert report["kernels"] == [
        {
            "variant": "fits",
            "arch": 90,
            "warps": 4,
            "registers": 20,
            "local_bytes": 0,
            "local_accesses": 0,
            "shared_bytes": 32,
            "instructions": 125,
        }
    ]
    assert report["traffic"] == [
        {"name": "remap, 1 member", "loaded": 150, "stored": 50, "floor": 100, "in_sectors": 96, "ratio": 2.0}
    ]
    assert [(entry["form"], entry["total"]) for entry in report["launches"]] == [
        ("per layer", 99),
        ("grouped", 42),
        ("fused", 21),
    ]


def test_tables(compiled: list[KernelFacts]) -> None:
    found = CliRunner().invoke(app, COMMAND)
    assert found.exit_code == 0, found.output
    rows = " ".join(found.stdout.split())
    assert "│ fits │ sm_90 │ 4 │ 20 │ 0 │ 0 │ 32 │ 125 │" in rows
    assert "│ remap, 1 member │ 150 │ 50 │ 100 │ 2.000 │ 96 │" in rows
    assert "│ fused │ 21 │ 0 │ 21 │" in rows
    assert bench_kernels.ABOUT_TRAFFIC in rows


def test_a_kernel_in_local_memory_is_an_error(compiled: list[KernelFacts]) -> None:
    compiled.append(SPILLS)
    found = CliRunner().invoke(app, COMMAND)
    assert found.exit_code == 1
    assert "spills" in found.stdout
    assert found.stderr == "error: kernels that need local memory: spills (sm_90)\n"


def test_says_so_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr("kvplugin.kernels.static.find_spec", lambda name: None if name == "triton" else find_spec(name))
    found = CliRunner().invoke(app, COMMAND)
    assert isinstance(found.exception, KernelToolsError)
    assert str(found.exception) == "triton: not installed; pip install 'kvplugin[dev]'; GPU builds of torch bring it"
    assert str(pickle.loads(pickle.dumps(found.exception))) == str(found.exception)


def test_refuses_to_time() -> None:
    found = CliRunner().invoke(app, ["bench", "kernels"], env={"COLUMNS": "200"})
    assert found.exit_code == 2
    assert "kernels are not timed, on no machine; give --static" in " ".join(found.output.replace("│", " ").split())


def test_refuses_an_architecture_it_does_not_know() -> None:
    found = CliRunner().invoke(app, ["bench", "kernels", "--static", "--arch", "12"], env={"COLUMNS": "200"})
    assert found.exit_code == 2
    assert "12 is not known; use 80, 90, 100" in found.output


def test_launches_of_glm52() -> None:
    assert launches_of(GLM52) == (
        Launches("per layer", 21, 78),
        Launches("grouped", 21, 21),
        Launches("fused", 21, 0),
    )


def test_launches_of_a_pipeline_stage_that_starts_with_a_follower() -> None:
    """It has no leader, so it converts for itself in every form."""
    launches = launches_of(layout_from_mask([False, True, False, False]))
    assert [(entry.policy, entry.remap, entry.total) for entry in launches] == [(1, 4, 5), (1, 2, 3), (1, 1, 2)]
