"""One fused call as plain data, on whichever device an implementation is tested."""

from __future__ import annotations

from types import ModuleType

import torch
from devices import device_of, each_of, numba_form
from hypothesis import strategies as st
from policy_cases import Case, lay_out, to_device
from torch import Tensor

from kvplugin import fused
from kvplugin.config import Mode, PolicyConfig
from kvplugin.fused import separate, triton_ops
from kvplugin.fused.call import FusedCall
from kvplugin.remap import Member, new_remap_counters
from kvplugin.remap.call import NO_CONTEXT_PARALLEL, RemapCall
from kvplugin.topology import PolicyTable, lower, new_counters
from kvplugin.topology.call import ArmsCall

IMPLEMENTATIONS = {"separate": separate, "numba_ops": numba_form(fused.__name__), "triton_ops": triton_ops}
every_implementation = each_of(IMPLEMENTATIONS)

MERGE = lower(PolicyConfig(mode=Mode.SPARSE_MERGE, sink_tokens=1, local_tokens=2), 16)
MEMBERS = (Member(64), Member(128, 64))

PAGE = 16
NUM_BLOCKS = 40
POISON = 2143289344


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(3, 200, generator=generator)
    table = torch.randperm(12, generator=generator).reshape(3, 4).int()
    return scores.topk(16).indices.int(), torch.full((3,), 200), torch.arange(3), table, scores


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


def armed_call(table: PolicyTable, row_arm: Tensor | None, device: torch.device) -> FusedCall:
    """The rows of :func:`batch` under the policies of a table, which lies on the same device."""
    topk, lengths, requests, blocks, scores = batch()
    pool = requests, blocks, torch.tensor(MEMBERS)
    call = fused_call(Case(topk=topk, row_lengths=lengths, params=MERGE, scores=scores), pool, device)
    policy = call.policy._replace(
        row_arm=to_device(row_arm, device),
        policies=table.rows,
        enabled=table.enabled,
        listed_witnesses=table.listed_witnesses,
        counters=new_counters(device, 1, len(table.rows)),
    )
    return FusedCall(policy, call.remap._replace(block_size=64, num_blocks=12))


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


def devices(implementation: ModuleType) -> tuple[torch.device, torch.device]:
    """Of the reference's call, and of the implementation's."""
    return torch.device("cpu"), device_of(implementation)


def assert_same(actual: FusedCall, expected: FusedCall) -> None:
    for name, found, wanted in zip(NAMES, results(actual), results(expected), strict=True):
        assert torch.equal(found, wanted), f"{name}: {found.tolist()}, expected {wanted.tolist()}"


NAMES = ("selection", "physical rows", "valid counts", "policy counters", "remap counters", "error record")
