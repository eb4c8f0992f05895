"""The public function and its registered operator: tracing, graphs, buffers of the caller, empty calls, imports."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from kvplugin import forms
from kvplugin.remap import Member, RemapCounter, new_remap_counters, op, reference, remap_grouped, torch_ops, triton_ops
from kvplugin.remap.call import RemapCall
from kvplugin.remap.op import place_members

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MEMBERS = (Member(64), Member(192, 64))
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Five rows of 100 slots of two requests, some slots unused, one request id out of range."""
    random = torch.Generator().manual_seed(seed)
    topk = torch.randint(-1, 640, (5, 100), generator=random, dtype=torch.int32)
    table = torch.randint(20, (2, 10), generator=random, dtype=torch.int32)
    return topk.to(DEVICE), torch.tensor([0, 1, 1, 7, 0], dtype=torch.int32, device=DEVICE), table.to(DEVICE)


def remap(*tensors: Tensor, **changes: Any) -> op.Remapped:
    settings: dict[str, Any] = {"block_size": 64, "num_blocks": 20, "members": MEMBERS}
    return remap_grouped(*tensors, **(settings | changes))


def expected(*tensors: Tensor, compact: bool = False) -> RemapCall:
    """The call that the reference answers, answered."""
    topk, request_of_row, table = (tensor.cpu() for tensor in tensors)
    call = RemapCall(
        topk=topk,
        request_of_row=request_of_row,
        block_table=table,
        members=torch.tensor(MEMBERS),
        block_size=64,
        num_blocks=20,
        compact=compact,
        context_parallel=op.NO_CONTEXT_PARALLEL,
        workspace=None,
        physical=torch.empty(len(MEMBERS), *topk.shape, dtype=torch.int32),
        valid=torch.empty(len(topk), dtype=torch.int32),
        counters=new_remap_counters(stripes=1),
    )
    reference.remap_into(call)
    return call


def assert_equal(found: op.Remapped, wanted: RemapCall) -> None:
    torch.testing.assert_close(found.physical.cpu(), wanted.physical, rtol=0, atol=0)
    torch.testing.assert_close(found.valid.cpu(), wanted.valid, rtol=0, atol=0)


def operator_arguments(*, optional: bool) -> tuple[object, ...]:
    """Arguments of the registered operator; with or without everything that may be None."""
    topk, request_of_row, table = batch()
    rows, width = topk.shape
    given = (
        torch.full((rows,), -1, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, dtype=torch.int32, device=DEVICE),
        0,
        torch.empty(2, rows, width, dtype=torch.int32, device=DEVICE),
        torch.empty(rows, dtype=torch.int32, device=DEVICE),
        new_remap_counters(DEVICE),
    )
    if not optional:
        given = (None, None, 0, given[3], None, None)
    return topk, request_of_row, table, place_members(MEMBERS, DEVICE), 64, 20, optional, 1, 0, 1, *given


@pytest.mark.parametrize("optional", [True, False])
def test_opcheck(optional: bool) -> None:
    checks = torch.library.opcheck(torch.ops.kvplugin.remap_grouped.default, operator_arguments(optional=optional))
    assert set(checks.values()) == {"SUCCESS"}


@pytest.mark.filterwarnings("error")
def test_compiles_into_one_graph() -> None:
    counters, tensors = new_remap_counters(DEVICE), batch()
    compiled = torch.compile(
        lambda *tensors: remap(*tensors, compact=True, counters=counters), fullgraph=True, backend="aot_eager"
    )
    for _ in range(2):
        assert_equal(compiled(*tensors), wanted := expected(*tensors, compact=True))
    assert wanted.counters is not None
    assert counters.tolist() == (2 * wanted.counters[0]).tolist()


def test_traces_without_data() -> None:
    tensors = [tensor.to("meta") for tensor in batch()]
    found = remap(*tensors, count_valid=True)
    assert (found.physical.shape, found.physical.dtype, found.physical.device.type) == (
        (2, 5, 100),
        torch.int32,
        "meta",
    )
    assert found.valid is not None
    assert (found.valid.shape, found.valid.dtype) == ((5,), torch.int32)


def test_fake_tensors_leave_nothing_behind() -> None:
    members = (Member(64), Member(64, 640))
    for _ in range(2):
        with FakeTensorMode() as mode:
            fake = remap(*(mode.from_tensor(tensor) for tensor in batch()), members=members)
            assert fake.physical.shape == (2, 5, 100)
        real = remap(*batch(), members=members)
        assert type(real.physical) is Tensor
        assert (real.physical[1] - real.physical[0]).unique().tolist() == [0, 640]


@needs_gpu
@pytest.mark.parametrize("implementation", [torch_ops, triton_ops])
def test_a_captured_graph_reads_its_inputs_anew(implementation: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "implementation_for", lambda device_type: implementation)
    tensors, counters = batch(), new_remap_counters(DEVICE, stripes=4)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        remap(*tensors, compact=True, counters=counters)
    torch.cuda.synchronize()
    counters.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = remap(*tensors, compact=True, counters=counters)
    total = torch.zeros(len(RemapCounter), dtype=torch.int64)
    for seed in (1, 2):
        for tensor, fresh in zip(tensors, batch(seed), strict=True):
            tensor.copy_(fresh)
        graph.replay()
        torch.cuda.synchronize()
        wanted = expected(*tensors, compact=True)
        assert_equal(found, wanted)
        assert wanted.counters is not None
        total += wanted.counters[0]
    assert counters.sum(0).tolist() == total.tolist()


def test_writes_to_buffers_of_the_caller() -> None:
    tensors = batch()
    out = torch.empty(2, 9, 100, dtype=torch.int32, device=DEVICE)[:, 2:7]
    valid = torch.empty(9, dtype=torch.int32, device=DEVICE)[2:7]
    counters = new_remap_counters(DEVICE)
    found = remap(*tensors, count_valid=True, out=out, valid_out=valid, counters=counters)
    assert found.physical is out
    assert found.valid is valid
    assert_equal(found, expected(*tensors))
    assert counters[RemapCounter.INVALID_REQUEST] == (tensors[0][3] >= 0).sum()


def test_counters_are_added_to() -> None:
    tensors = batch()
    once, striped = new_remap_counters(DEVICE), new_remap_counters(DEVICE, stripes=2)
    remap(*tensors, counters=once)
    for _ in range(3):
        remap(*tensors, counters=striped)
    assert striped.sum(0).tolist() == (3 * once).tolist()
    assert once.any()
    assert striped[0].tolist() == [0] * len(RemapCounter), "the only bad row, 3, belongs to stripe 1"


def test_counts_nothing_unless_asked() -> None:
    assert remap(*batch()).valid is None
    assert remap(*batch(), compact=True).valid is not None


@pytest.mark.parametrize(("members", "rows", "width"), [(0, 3, 4), (2, 0, 4), (2, 3, 0), (0, 0, 0)])
def test_an_empty_call_runs_nothing(members: int, rows: int, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(op, "implementation_for")
    counters = new_remap_counters(DEVICE)
    found = remap(
        torch.zeros(rows, width, dtype=torch.int32, device=DEVICE),
        torch.zeros(rows, dtype=torch.int32, device=DEVICE),
        torch.zeros(1, 1, dtype=torch.int32, device=DEVICE),
        members=MEMBERS[:members],
        count_valid=True,
        counters=counters,
    )
    assert found.physical.shape == (members, rows, width)
    assert found.valid is not None
    assert found.valid.tolist() == [0] * rows
    assert not counters.any()


def test_equal_members_share_one_tensor() -> None:
    first = place_members((Member(64), Member(64, 7)), DEVICE)
    assert place_members((Member(64, 0), Member(64, 7)), DEVICE) is first
    assert first.tolist() == [[64, 0], [64, 7]]


def test_falls_back_to_torch(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def import_module(name: str) -> ModuleType:
        if "numba" in name or "triton" in name:
            raise ImportError("not here")
        return torch_ops

    monkeypatch.setattr(forms, "import_module", import_module)
    with caplog.at_level(logging.WARNING, forms.logger.name):
        for device_type in ("cpu", "cuda", "xpu"):
            assert op.implementation_for.__wrapped__(device_type) is torch_ops
    assert [record.getMessage() for record in caplog.records] == [
        f"kvplugin: {name} cannot be used (not here); the remap runs in its slower torch form"
        for name in ("numba", "triton")
    ]


def test_importing_the_package_loads_no_compiler() -> None:
    code = "import sys, kvplugin.remap; print({'numba', 'triton', 'vllm'} & sys.modules.keys() or '')"
    finished = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert finished.stdout.strip() == ""
