"""The fused form equals the policy followed by the remap, row for row and counter for counter."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from devices import device_of
from fused_cases import (
    IMPLEMENTATIONS,
    MEMBERS,
    MERGE,
    armed_call,
    assert_same,
    batch,
    devices,
    every_implementation,
    fused_call,
    pools,
)
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import Case
from strategies import cases

from kvplugin import forms, fused
from kvplugin.config import Mode, PolicyConfig
from kvplugin.errors import ArgumentError
from kvplugin.fused import apply_and_remap, op, reference, separate
from kvplugin.remap import new_remap_counters, remap_grouped
from kvplugin.topology import Counter, PolicyTable, apply_topology_policy, lower, new_counters


def test_every_implementation_is_listed() -> None:
    modules = {path.stem for path in Path(fused.__file__).parent.glob("*.py")}
    assert modules - {"__init__", "op", "call", "reference"} == set(IMPLEMENTATIONS)


@every_implementation
@given(case=cases(offsets_given=False), data=st.data())
def test_matches_reference(implementation: ModuleType, case: Case, data: st.DataObject) -> None:
    pool = data.draw(pools(len(case.topk)))
    expected, actual = fused_call(case, pool, torch.device("cpu")), fused_call(case, pool, device_of(implementation))
    reference.fused_into(expected)
    implementation.fused_into(actual)
    assert_same(actual, expected)


ARMS = [
    lower(PolicyConfig(mode=mode, sink_tokens=1, local_tokens=2), 16)
    for mode in (Mode.SPARSE_MERGE, Mode.ONLY, Mode.DISABLED)
]


@every_implementation
@pytest.mark.parametrize("row_arm", [(0, 1, 2), (1, 3, -1), None], ids=["known", "unknown", "first"])
def test_rows_of_several_arms(implementation: ModuleType, row_arm: tuple[int, ...] | None) -> None:
    arm = None if row_arm is None else torch.tensor(row_arm, dtype=torch.int32)
    expected, actual = (armed_call(PolicyTable(ARMS, device), arm, device) for device in devices(implementation))
    reference.fused_into(expected)
    implementation.fused_into(actual)
    assert_same(actual, expected)


@every_implementation
@pytest.mark.parametrize("mode", [Mode.SPARSE_MERGE, Mode.DISABLED])
@pytest.mark.parametrize("on", [True, False], ids=["on", "off"])
def test_rows_that_no_policy_touches_are_translated(implementation: ModuleType, mode: Mode, on: bool) -> None:
    calls = []
    for device in devices(implementation):
        table = PolicyTable([lower(PolicyConfig(mode=mode, sink_tokens=1, local_tokens=2), 16)], device)
        table.switch(on=on)
        calls.append(armed_call(table, None, device))
    expected, actual = calls
    reference.fused_into(expected)
    implementation.fused_into(actual)
    assert_same(actual, expected)
    assert bool(actual.policy.counters.any()) == (on and mode is not Mode.DISABLED)
    assert actual.remap.valid.tolist() == [16, 16, 16]


def test_equals_the_two_calls() -> None:
    topk, lengths, requests, table, scores = batch()
    rows = topk.clone()
    counted = apply_topology_policy(rows, lengths, config=MERGE, scores=scores)
    pool = {"block_size": 64, "num_blocks": 12, "members": MEMBERS}
    separately = remap_grouped(rows, requests, table, count_valid=True, **pool)
    counters = new_counters()
    at_once = apply_and_remap(
        topk, lengths, requests, table, config=MERGE, scores=scores, count_valid=True, policy_counters=counters, **pool
    )
    assert torch.equal(topk, rows)
    assert torch.equal(at_once.physical, separately.physical)
    assert torch.equal(at_once.valid, separately.valid)
    assert torch.equal(counters, counted)


@pytest.mark.parametrize(("rows", "members"), [(0, 2), (3, 0)])
def test_nothing_to_translate(rows: int, members: int) -> None:
    topk, lengths, requests, table, scores = (part[:rows] for part in batch())
    result = apply_and_remap(
        topk,
        lengths,
        requests,
        table,
        config=MERGE,
        scores=scores,
        block_size=64,
        num_blocks=12,
        members=MEMBERS[:members],
        count_valid=True,
    )
    assert result.physical.shape == (members, rows, 16)
    assert result.valid.tolist() == [0] * rows
    assert (topk == 199).any(1).all()


def test_opcheck() -> None:
    topk, lengths, requests, table, scores = batch()
    policy = PolicyTable([MERGE])
    rows = (
        topk,
        lengths,
        None,
        None,
        None,
        None,
        scores,
        None,
        None,
        policy.rows,
        policy.enabled,
        0,
        new_counters(),
        None,
    )
    pool = (requests, table, torch.tensor(MEMBERS), 64, 12, False, 1, 0, 1, None, None, 0)
    outputs = (torch.empty(2, 3, 16, dtype=torch.int32), torch.empty(3, dtype=torch.int32), new_remap_counters())
    torch.library.opcheck(torch.ops.kvplugin.policy_and_remap, (*rows, *pool, *outputs))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk": torch.zeros(3, 1, 16)}, "apply_and_remap.topk: got 3 dimensions; must be [T, K]"),
        (
            {"scores": None},
            "apply_and_remap.scores: None with eviction = lowest_score; give the indexer's scores, or another eviction",
        ),
        (
            {"policy_counters": torch.zeros(3, dtype=torch.int64)},
            f"apply_and_remap.policy_counters: got int64 [3] on cpu; must be int64 [2, {len(Counter)}] on cpu",
        ),
        (
            {"remap_counters": torch.zeros(3, dtype=torch.int64)},
            "apply_and_remap.remap_counters: got int64 [3] on cpu; must be int64 [5] on cpu",
        ),
        ({"block_size": 0}, "apply_and_remap.block_size: got 0; must be in [1, 2147483647]"),
        (
            {"request_of_row": torch.zeros(2, dtype=torch.int32)},
            "apply_and_remap.request_of_row: got int32 [2] on cpu; must be int32 or int64 [3] on cpu",
        ),
    ],
)
def test_refuses(changes: dict[str, object], message: str) -> None:
    names = ("topk", "row_lengths", "request_of_row", "block_table", "scores")
    given = {**dict(zip(names, batch(), strict=True)), "block_size": 64, "num_blocks": 12, "members": MEMBERS}
    with pytest.raises(ArgumentError) as refusal:
        apply_and_remap(**(given | changes), config=MERGE)
    assert str(refusal.value) == message


def test_falls_back_to_the_two_parts(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def import_module(name: str) -> ModuleType:
        if "numba" in name or "triton" in name:
            raise ImportError("not here")
        return separate

    monkeypatch.setattr(forms, "import_module", import_module)
    with caplog.at_level(logging.WARNING, forms.logger.name):
        for device_type in ("cpu", "cuda", "xpu"):
            assert op.implementation_for.__wrapped__(device_type) is separate
    assert [record.getMessage() for record in caplog.records] == [
        f"kvplugin: {name} cannot be used (not here); policy and remap run one by one" for name in ("numba", "triton")
    ]


def test_importing_the_package_loads_no_compiler() -> None:
    code = "import sys, kvplugin.fused; print({'numba', 'triton', 'vllm'} & sys.modules.keys() or '')"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert finished.stdout.strip() == ""
