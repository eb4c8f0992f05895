"""``kvplugin replay`` and its benchmark: output, exit status, and nothing written but what was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner

from kvplugin.cli.bench import app as bench
from kvplugin.cli.bench_replay import BenchReplayRequest, _peak_bytes, run_bench_replay
from kvplugin.cli.replay import replay
from kvplugin.errors import ArgumentError
from kvplugin.replay import Capture, write_capture
from kvplugin.replay.selftest.faults import FAULTS, Fault
from kvplugin.replay.selftest.synthetic import Shape, make_capture, make_record

app = typer.Typer()
app.command("replay")(replay)
WIDE = {"COLUMNS": "200"}


@app.callback()
def main() -> None:
    """A command beside it, so that ``replay`` keeps its name."""


def run(*arguments: str | Path) -> tuple[int, str, str]:
    found = CliRunner().invoke(app, ["replay", *map(str, arguments)], env=WIDE)
    assert found.exception is None or isinstance(found.exception, SystemExit), found.exception
    return found.exit_code, found.stdout, found.stderr


@pytest.fixture
def good(tmp_path: Path) -> Path:
    write_capture(make_capture(Shape(world=2)), tmp_path / "good")
    return tmp_path / "good"


def faulty(folder: Path, name: str) -> Fault:
    fault = next(each for each in FAULTS if each.name == name)
    write_capture(Capture("engine", "model", fault.records()), folder)
    return fault


def test_a_match_exits_0(good: Path) -> None:
    status, output, errors = run(good)
    assert (status, errors) == (0, "")
    assert "decode matches prefill: 2 records within tolerance" in output


def test_drift_exits_1_and_says_where(tmp_path: Path) -> None:
    fault = faulty(tmp_path / "bad", "newest key dropped")
    status, output, _ = run(tmp_path / "bad")
    assert status == 1
    assert "drift at stage attention: request r0, layer 0, step 0, position 89" in output
    assert fault.named in output


def test_a_stale_prefix_is_drift_not_bad_input(tmp_path: Path) -> None:
    faulty(tmp_path / "bad", "prefix altered under the same key")
    status, output, _ = run(tmp_path / "bad")
    assert status == 1
    assert "drift at stage identity: request r0, layer 0" in output


def test_bad_input_exits_2_in_one_line(good: Path) -> None:
    (good / "tensors.safetensors").write_bytes(b"short")
    status, output, errors = run(good)
    assert (status, output) == (2, "")
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert "must be a whole safetensors file" in errors


@pytest.mark.parametrize("arguments", [(), ("--selftest", "somewhere")])
def test_either_a_capture_or_the_selftest(arguments: tuple[str, ...]) -> None:
    status, _, errors = run(*arguments)
    assert status == 2
    assert "give a capture folder, or --selftest" in errors


def test_json(good: Path) -> None:
    status, output, _ = run(good, "--json")
    report = json.loads(output)
    assert (status, report["within"], len(report["records"])) == (0, True, 2)


def test_html_is_all_that_is_written(good: Path, tmp_path: Path) -> None:
    before = set(tmp_path.rglob("*"))
    status, _, _ = run(good, "--html", tmp_path / "out.html")
    assert status == 0
    assert set(tmp_path.rglob("*")) - before == {tmp_path / "out.html"}
    assert (tmp_path / "out.html").read_text().startswith("<!doctype html>")


def test_html_that_cannot_be_written(good: Path, tmp_path: Path) -> None:
    status, _, errors = run(good, "--html", tmp_path / "nowhere" / "out.html")
    assert status == 2
    assert "name a file in a folder that can be written" in errors


def test_strict(tmp_path: Path) -> None:
    write_capture(make_capture(Shape(length=400), layers=1), tmp_path)
    assert run(tmp_path)[0] == 0
    status, output, _ = run(tmp_path, "--strict")
    assert status == 1
    assert "drift at stage attention" in output


def test_split_size(good: Path) -> None:
    assert run(good, "--split-size", "32")[0] == 0
    status, _, errors = run(good, "--split-size", "20")
    assert status == 2
    assert "split_size: got 20; must be a positive integer and a multiple of 16" in errors


def test_selftest() -> None:
    status, output, _ = run("--selftest")
    assert status == 0
    assert "18 of 18 cases as they should be" in output
    status, output, _ = run("--selftest", "--json")
    assert json.loads(output)["passed"] is True


def test_bench() -> None:
    report = run_bench_replay(BenchReplayRequest(context=200, kv_heads=2, dim=8, page=16, repeats=7))
    assert set(report.medians_ms) == {"loop", "loop_copying", "vectorised", "vectorised_copying", "dense", "compare"}
    assert {"loop/vectorised", "compare/dense"} <= report.ratios.keys()
    assert min(report.medians_ms.values()) > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context": 0}, "--context: got 0; must be in [1, 4194304]"),
        ({"kv_heads": 0}, "--kv-heads: got 0; must be in [1, 1024]"),
        ({"repeats": 3}, "--repeats: got 3; must be in [7, 1000]"),
        ({"page": 10**12}, "--page: got 1000000000000; must be in [1, 4096]"),
        ({"dim": 3}, "--dim: got 3; must be even: elements are rotated in pairs"),
        ({"context": 1 << 22}, "--context: 4194304 tokens of 8 heads of 128 need 52.0 GiB; at most 32 GiB"),
    ],
)
def test_bench_refuses(options: dict[str, int], message: str) -> None:
    with pytest.raises(ArgumentError) as error:
        BenchReplayRequest(**options)
    assert str(error.value) == f"kvplugin bench replay {message}"


def test_bench_command_refuses_in_the_options_words() -> None:
    found = CliRunner().invoke(bench, ["replay", "--dim", "3"], env=WIDE)
    assert found.exit_code == 2
    assert "Invalid value for --dim: got 3; must be even" in found.output


def test_peak_is_what_the_call_needs() -> None:
    """Memory that an earlier call has freed counts as well."""
    size = 64 << 20
    bytearray(size)
    found = _peak_bytes(lambda: torch.ones(size // 4))
    assert found is None or 0.9 * size < found < 1.5 * size


def test_records_of_different_requests(tmp_path: Path) -> None:
    records = tuple(make_record(Shape(length=30 + row), seed=row, request=f"r{row}") for row in range(3))
    write_capture(Capture("engine", "model", records), tmp_path)
    assert run(tmp_path)[0] == 0


def test_html_never_replaces_the_capture(good: Path) -> None:
    before = (good / "manifest.json").read_bytes()
    status, _, errors = run(good, "--html", good / "manifest.json")
    assert status == 2
    assert "is inside the capture; name a file elsewhere" in errors
    assert (good / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("scale", [1e308, 5e-324])
def test_a_scale_that_no_head_has(tmp_path: Path, scale: float) -> None:
    capture = make_capture(Shape())
    records = [replace(each, inputs=replace(each.inputs, scale=scale)) for each in capture.records]
    write_capture(Capture(capture.engine, capture.model, records), tmp_path / "extreme")
    status, output, errors = run(tmp_path / "extreme")
    assert (status, output) == (2, "")
    assert f"replay.scale: got {scale!r}; must be in [1e-12, 1000000000000.0]" in errors


def test_a_query_that_leaves_no_tolerance_is_drift(tmp_path: Path) -> None:
    capture = make_capture(Shape())
    records = [replace(each, inputs=replace(each.inputs, q=each.inputs.q * 1e37)) for each in capture.records]
    write_capture(Capture(capture.engine, capture.model, records), tmp_path / "extreme")
    status, output, errors = run(tmp_path / "extreme")
    assert (status, errors) == (1, "")
    assert "drift at stage attention" in output


def test_a_path_that_no_file_can_have(tmp_path: Path) -> None:
    status, _, errors = run(tmp_path / ("x" * 5000))
    assert status == 2
    assert errors.count("\n") == 1
