"""``kvplugin bench remap`` on small shapes: what it reports and what it refuses; nothing about how long it takes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kvplugin.cli import bench_remap
from kvplugin.cli.bench_remap import BenchRemapRequest, RemapsDiffer, learned_batch, run_bench_remap
from kvplugin.cli.bench_remap_calls import contestants_of
from kvplugin.cli.bench_report import render
from kvplugin.errors import ArgumentError
from kvplugin.fused import numba_ops, separate
from kvplugin.remap import reference, torch_ops
from kvplugin.remap.call import RemapCall

SMALL = BenchRemapRequest(rows=3, width=40, length=200, layers=2, repeats=7)


def test_json_has_medians_and_ratios() -> None:
    report = json.loads(render(run_bench_remap(SMALL), json=True))
    medians = report["medians_ms"]
    forms = [f"{calls}_{form}" for form in ("numba", "torch") for calls in ("per_layer", "grouped", "separate")]
    assert list(medians) == ["fused_numba", *forms, "copy"]
    assert min(medians.values()) > 0
    for name in ("per_layer_numba/grouped_numba", "separate_numba/fused_numba", "grouped_numba/copy"):
        a, b = name.split("/")
        assert report["ratios"][name] == pytest.approx(medians[a] / medians[b])
    assert (report["rows"], report["width"], report["length"], report["layers"]) == (3, 40, 200, 2)


def test_table_names_every_contestant() -> None:
    table = render(run_bench_remap(SMALL), json=False)
    assert all(name in table for name in ("per_layer_numba", "grouped_torch", "copy", "separate_numba/fused_numba"))


@pytest.mark.parametrize("length", [1, 39, 40, 200])
def test_its_rows_hold_no_fault(length: int) -> None:
    call = learned_batch(BenchRemapRequest(rows=5, width=40, length=length, layers=3)).call.remap
    reference.remap_into(call)
    valid = (call.physical >= 0).sum(2)
    assert (valid == min(40, length)).all()
    for row in call.physical.flatten(0, 1).tolist():
        used = [slot for slot in row if slot >= 0]
        assert len(set(used)) == len(used)


def test_rows_are_restored_before_each_turn() -> None:
    batch = learned_batch(SMALL)
    contestants = contestants_of(batch.call)
    contestants["fused_numba"].run()
    assert not torch.equal(batch.call.remap.topk, batch.learned)
    batch.prepare(contestants["separate_torch"])
    assert torch.equal(batch.call.remap.topk, batch.learned)


@pytest.mark.parametrize(("rows", "wrong_row", "other"), [(3, 2, "reference"), (130, 1, "per_layer_numba")])
def test_a_wrong_result_is_not_timed(rows: int, wrong_row: int, other: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the larger batch, row 1 is not among those that the reference translates."""
    remap: Callable[[RemapCall], None] = torch_ops.remap_into

    def spoil(call: RemapCall) -> None:
        remap(call)
        call.physical[0, wrong_row, 0] += 1

    monkeypatch.setattr(torch_ops, "remap_into", spoil)
    monkeypatch.setattr(bench_remap.time, "perf_counter", lambda: pytest.fail("timed"))
    with pytest.raises(RemapsDiffer) as refusal:
        run_bench_remap(replace(SMALL, rows=rows))
    assert str(refusal.value) == (
        f"kvplugin bench remap: per_layer_torch and {other} differ; nothing was timed; report this"
    )


def test_a_wrong_fused_result_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba_ops, "fused_into", separate.fused_into)
    monkeypatch.setattr(separate, "apply_arms_into", lambda topology, call: None)
    with pytest.raises(RemapsDiffer, match="fused_numba and reference differ"):
        run_bench_remap(SMALL)


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
    assert request.pool.members == ((8, 0), (8, 4))
    assert request.pool.num_blocks == 4
