"""The fused form equals the policy followed by the remap, row for row and counter for counter."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from devices import device_of
from hypothesis import given
from hypothesis import strategies as st
from policy_cases import Case, lay_out, to_device
from strategies import cases
from torch import Tensor

from kvplugin import fused
from kvplugin.config import Mode, PolicyConfig
from kvplugin.errors import ArgumentError
from kvplugin.fused import apply_and_remap, reference, separate, triton_ops
from kvplugin.fused.call import FusedCall
from kvplugin.remap import Member, new_remap_counters, remap_grouped
from kvplugin.remap.call import NO_CONTEXT_PARALLEL, RemapCall
from kvplugin.topology import PolicyTable, apply_topology_policy, lower, new_counters
from kvplugin.topology.call import ArmsCall

IMPLEMENTATIONS = {module.__name__.rpartition(".")[2]: module for module in (separate, triton_ops)}
every_implementation = pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS.keys())

PAGE = 16
NUM_BLOCKS = 40
POISON = 2143289344


@st.composite
def pools(draw: st.DrawFn, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Requests of the rows, block table and members; with ids and pages that do not exist among them."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    requests = torch.tensor(draw(st.lists(st.sampled_from((0, 1, 1, -1, 2, POISON)), min_size=rows, max_size=rows)))
    table = torch.randint(-1, NUM_BLOCKS + 2, (2, draw(st.sampled_from((1, 5, 13)))), generator=generator)
    members = [(48, 16), (PAGE, 0), (2**26, 0)][: draw(st.integers(1, 3))]
    return requests.int(), table.int(), torch.tensor(members, dtype=torch.int64).reshape(-1, 2)


def fused_call(case: Case, pool: tuple[Tensor, Tensor, Tensor], device: torch.device) -> FusedCall:
    table = PolicyTable([case.params], device)
    given = {name: to_device(value, device) for name, value in vars(case).items() if name not in ("params", "layout")}
    given["topk"] = lay_out(case.topk.to(device), case.layout)[0]
    policy = ArmsCall(
        **given,
        row_arm=None,
        policies=table.rows,
        enabled=table.enabled,
        listed_witnesses=table.listed_witnesses,
        counters=new_counters(device, 1, 1),
        error=torch.zeros(4, dtype=torch.int64, device=device),
    )
    requests, blocks, members = (part.to(device) for part in pool)
    remap = RemapCall(
        policy.topk,
        requests,
        blocks,
        members,
        PAGE,
        NUM_BLOCKS,
        False,
        NO_CONTEXT_PARALLEL,
        None,
        torch.full((len(members), *case.topk.shape), POISON, dtype=torch.int32, device=device),
        torch.full((len(case.topk),), POISON, dtype=torch.int32, device=device),
        new_remap_counters(device, 2),
    )
    return FusedCall(policy, remap)


def results(call: FusedCall) -> tuple[Tensor, ...]:
    """Rows are sets, so slots are put in an order."""
    ordered = call.policy.topk.cpu().sort(1).values, call.remap.physical.cpu().sort(2).values
    return (
        *ordered,
        call.remap.valid.cpu(),
        call.policy.counters.cpu(),
        call.remap.counters.cpu(),
        call.policy.error.cpu(),
    )


NAMES = ("selection", "physical rows", "valid counts", "policy counters", "remap counters", "error record")


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
    for name, found, wanted in zip(NAMES, results(actual), results(expected), strict=True):
        assert torch.equal(found, wanted), f"{name}: {found.tolist()}, expected {wanted.tolist()}"


MERGE = lower(PolicyConfig(mode=Mode.SPARSE_MERGE, sink_tokens=1, local_tokens=2), 16)
MEMBERS = (Member(64), Member(128, 64))


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 200, generator=generator)
    table = torch.randperm(12, generator=generator).reshape(3, 4).int()
    return scores.topk(16).indices.int(), torch.full((3,), 200), torch.arange(3), table, scores


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
