"""``kvplugin bench remap`` on small shapes: what it reports and what it refuses; nothing about how long it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvplugin.cli import bench_remap
from kvplugin.cli.bench_remap import BenchRemapRequest, RemapsDiffer, learned_rows, run_bench_remap
from kvplugin.cli.bench_report import render
from kvplugin.errors import ArgumentError
from kvplugin.remap import reference, torch_ops
from kvplugin.remap.call import RemapCall

SMALL = BenchRemapRequest(rows=3, width=40, length=200, layers=2, repeats=7)


def test_json_has_medians_and_ratios() -> None:
    report = json.loads(render(run_bench_remap(SMALL), json=True))
    medians = report["medians_ms"]
    assert list(medians) == ["per_layer_numba", "grouped_numba", "per_layer_torch", "grouped_torch", "copy"]
    assert min(medians.values()) > 0
    for name in ("per_layer_numba/grouped_numba", "per_layer_torch/grouped_torch", "grouped_numba/copy"):
        a, b = name.split("/")
        assert report["ratios"][name] == pytest.approx(medians[a] / medians[b])
    assert (report["rows"], report["width"], report["length"], report["layers"]) == (3, 40, 200, 2)


def test_table_names_every_contestant() -> None:
    table = render(run_bench_remap(SMALL), json=False)
    assert all(name in table for name in ("per_layer_numba", "grouped_torch", "copy", "grouped_torch/grouped_numba"))


@pytest.mark.parametrize("length", [1, 39, 40, 200])
def test_its_rows_hold_no_fault(length: int) -> None:
    call = learned_rows(BenchRemapRequest(rows=5, width=40, length=length, layers=3))
    reference.remap_into(call)
    valid = (call.physical >= 0).sum(2)
    assert (valid == min(40, length)).all()
    for row in call.physical.flatten(0, 1).tolist():
        used = [slot for slot in row if slot >= 0]
        assert len(set(used)) == len(used)


def test_a_wrong_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    remap: Callable[[RemapCall], None] = torch_ops.remap_into

    def spoil(call: RemapCall) -> None:
        remap(call)
        call.physical[0, 0, 0] += 1

    monkeypatch.setattr(torch_ops, "remap_into", spoil)
    monkeypatch.setattr(bench_remap.time, "perf_counter", lambda: pytest.fail("timed"))
    with pytest.raises(RemapsDiffer) as refusal:
        run_bench_remap(SMALL)
    assert str(refusal.value) == (
        "kvplugin bench remap: per_layer_torch and reference differ; nothing was timed; report this"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows": 0}, "kvplugin bench remap --rows: got 0; must be at least 1"),
        ({"block_size": 0}, "kvplugin bench remap --block-size: got 0; must be at least 1"),
        ({"repeats": 6}, "kvplugin bench remap --repeats: got 6; must be at least 7"),
        (
            {"length": 10**7},
            "kvplugin bench remap --length: 10000000 blocks of 4 layers; their rows must fit int32",
        ),
    ],
)
def test_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        BenchRemapRequest(**changes)
    assert str(refusal.value) == message


def test_the_group_lies_side_by_side() -> None:
    request = BenchRemapRequest(rows=2, width=4, length=8, layers=2, block_size=4)
    call = learned_rows(request)
    assert torch.equal(call.members, torch.tensor([[8, 0], [8, 4]]))
    assert request.num_blocks == 4
