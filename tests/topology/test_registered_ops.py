"""The policy as operators of torch: what they declare is what they do, and they can be traced."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from kvplugin.config import Mode, PolicyConfig
from kvplugin.topology import PolicyTable, apply_topology_policy, lift_structural_scores, lower, new_counters

MERGE = lower(PolicyConfig(mode=Mode.SPARSE_MERGE, sink_tokens=1, local_tokens=2), 16)
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


def rows_and_scores(device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 40, generator=generator)
    return scores.topk(16).indices.int().to(device), torch.full((3,), 40, device=device), scores.to(device)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_policy(device: str) -> None:
    topk, lengths, scores = rows_and_scores(device)
    table = PolicyTable([MERGE], device)
    live, phase = torch.ones(3, dtype=torch.bool, device=device), torch.ones(3, dtype=torch.int8, device=device)
    arm, start = torch.zeros(3, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int32, device=device)
    rows = (topk, lengths, live, phase, arm, start, scores, start, None)
    arguments = (
        *rows,
        table.rows,
        table.enabled,
        0,
        new_counters(device),
        torch.zeros(4, dtype=torch.int64).to(device),
    )
    torch.library.opcheck(torch.ops.kvplugin.topology_policy, arguments)


@pytest.mark.parametrize("device", DEVICES)
def test_opcheck_lift(device: str) -> None:
    _, lengths, scores = rows_and_scores(device)
    table = PolicyTable([MERGE], device)
    arguments = (scores, lengths, None, None, None, None, table.rows, table.enabled, 16)
    torch.library.opcheck(torch.ops.kvplugin.lift_structural_scores, arguments)


def test_a_call_on_fake_tensors_leaves_nothing_behind() -> None:
    params = MERGE._replace(block_size=32)  # seen by no other test
    with FakeTensorMode():
        fake = (torch.empty(3, 16, dtype=torch.int32), torch.empty(3, dtype=torch.int64))
        apply_topology_policy(*fake, config=params, scores=torch.empty(3, 40))
    topk, lengths, scores = rows_and_scores("cpu")
    assert apply_topology_policy(topk, lengths, config=params, scores=scores).any()


@pytest.mark.parametrize("device", DEVICES)
def test_traced_in_one_graph(device: str) -> None:
    table, counters = PolicyTable([MERGE], device), new_counters(device)

    def step(topk: torch.Tensor, lengths: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        apply_topology_policy(topk, lengths, config=table, scores=scores, counters=counters)
        lift_structural_scores(scores, lengths, config=table, width=16)
        return topk + scores.isinf().sum()

    eager, traced = rows_and_scores(device), rows_and_scores(device)
    expected = step(*eager)
    assert torch.equal(torch.compile(step, fullgraph=True, backend="aot_eager")(*traced), expected)
    assert torch.equal(traced[0], eager[0])
