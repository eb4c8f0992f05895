"""Bytes that each kernel asks of memory for one row, counted while Triton's interpreter runs it.

:func:`kvplugin.kernels.static.kernel_traffic` runs it, as ``TRITON_INTERPRET=1 python -m kvplugin.kernels.traffic``.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial

import torch
from torch import Tensor

from kvplugin.config import Mode, PolicyConfig
from kvplugin.fused import triton_ops as fused_ops
from kvplugin.fused.call import FusedCall
from kvplugin.kernels.access_log import logged
from kvplugin.kernels.static import KernelTraffic
from kvplugin.remap import Member, new_remap_counters
from kvplugin.remap import triton_ops as remap_ops
from kvplugin.remap.call import NO_CONTEXT_PARALLEL, RemapCall
from kvplugin.topology import PolicyTable, lower, new_counters
from kvplugin.topology import triton_ops as policy_ops
from kvplugin.topology.call import ArmsCall, LiftArmsCall

WIDTH, CONTEXT, BLOCK_SIZE = 2048, 131072, 64
"""Slots of a row, as in DeepSeek-V3.2 and GLM-5.2; tokens to choose from, and tokens per block of the pool."""


def traffic_of(name: str, run: Callable[[], None]) -> KernelTraffic:
    """Count what the kernels that ``run`` launches load and store."""
    with logged() as (loads, stores):
        run()
    in_sectors = loads.in_sectors + stores.in_sectors
    return KernelTraffic(name, loads.moved, stores.moved, loads.distinct + stores.distinct, in_sectors)


def policy_row() -> ArmsCall:
    """One decode row as a serving engine has it: the top-k of scores of the whole context, and the default policy."""
    table = PolicyTable([lower(PolicyConfig(mode=Mode.SPARSE_MERGE), WIDTH)])
    scores = torch.randn(1, CONTEXT, generator=torch.Generator().manual_seed(0))
    return ArmsCall(
        topk=scores.topk(WIDTH).indices.to(torch.int32),
        row_lengths=torch.tensor([CONTEXT], dtype=torch.int32),
        row_live=torch.tensor([True]),
        row_phase=torch.tensor([1], dtype=torch.int8),
        row_arm=torch.tensor([0], dtype=torch.int32),
        offsets=None,
        scores=scores,
        score_start=None,
        witness_scores=None,
        policies=table.rows,
        enabled=table.enabled,
        listed_witnesses=table.listed_witnesses,
        counters=new_counters("cpu", 1, 1),
        error=None,
    )


def lift_row() -> LiftArmsCall:
    """The same row before its top-k."""
    given = {name: value for name, value in policy_row()._asdict().items() if name in LiftArmsCall._fields}
    return LiftArmsCall(**given, width=WIDTH)


def remap_row(topk: Tensor, members: int) -> RemapCall:
    """A decode row with its count, for so many layers with pools of their own, packed block by block."""
    blocks = CONTEXT // BLOCK_SIZE
    places = [Member(BLOCK_SIZE * members, BLOCK_SIZE * member) for member in range(members)]
    return RemapCall(
        topk=topk,
        request_of_row=torch.zeros(1, dtype=torch.int32),
        block_table=torch.randperm(blocks, generator=torch.Generator().manual_seed(0))[None].to(torch.int32),
        members=torch.tensor(places, dtype=torch.int64),
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        compact=False,
        context_parallel=NO_CONTEXT_PARALLEL,
        workspace=None,
        physical=torch.empty(members, 1, WIDTH, dtype=torch.int32),
        valid=torch.empty(1, dtype=torch.int32),
        counters=new_remap_counters(stripes=1),
    )


def all_traffic() -> list[KernelTraffic]:
    """Every kernel once; the remap for one layer, which also serves layers that share their rows, and for four."""
    policy = policy_row()
    remaps = {members: remap_row(policy.topk.clone(), members) for members in (1, 4)}
    fused_policy = policy_row()
    fused = FusedCall(fused_policy, remap_row(fused_policy.topk, 4))
    runs: dict[str, Callable[[], None]] = {
        "lift": partial(policy_ops.lift_arms_into, lift_row()),
        "policy": partial(policy_ops.apply_arms_into, policy),
        "remap, 1 member": partial(remap_ops.remap_into, remaps[1]),
        "remap, 4 members": partial(remap_ops.remap_into, remaps[4]),
        "policy and remap fused, 4 members": partial(fused_ops.fused_into, fused),
    }
    return [traffic_of(name, run) for name, run in runs.items()]


if __name__ == "__main__":
    print(json.dumps([asdict(entry) for entry in all_traffic()]))
