"""The registered operators on this GPU's tensors: what they declare is what they do, and they can be traced."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import kvplugin.fused  # noqa: F401 - registers an operator
from integration.gpu.batches import BLOCK_SIZE, MEMBERS, Shape, draw, policies
from integration.gpu.record import Record
from kvplugin.remap import new_remap_counters
from kvplugin.remap import op as remap_op
from kvplugin.topology import PolicyTable, new_counters
from kvplugin.topology import op as topology_op

SHAPE = Shape(3, 64, 300)


def run(record: Record, *, tiny: bool) -> None:
    for name, arguments in arguments_on(torch.device("cuda")).items():
        record.check(name, partial(check_operator, name, arguments))


def check_operator(name: str, arguments: tuple[Any, ...]) -> None:
    """Fail where an operator does something else than it declares, or cannot be traced."""
    torch.library.opcheck(getattr(torch.ops.kvplugin, name).default, arguments)


def arguments_on(device: torch.device) -> dict[str, tuple[Any, ...]]:
    """Arguments of every operator, with all that may be given."""
    batch = draw(SHAPE, 1).to(device)
    table = PolicyTable(policies(SHAPE.width)[:1], device)
    policy = topology_op.checked_call(
        "operators",
        batch.topk,
        batch.lengths,
        config=table,
        row_live=batch.live,
        row_phase=batch.phase,
        row_arm=batch.arm,
        scores=batch.scores,
        counters=new_counters(device),
        error=torch.zeros(4, dtype=torch.int64, device=device),
    )
    remap = remap_op.checked_call(
        "operators",
        batch.topk,
        batch.requests,
        batch.table,
        block_size=BLOCK_SIZE,
        num_blocks=batch.num_blocks,
        members=MEMBERS,
        count_valid=True,
        counters=new_remap_counters(device),
    )
    rows = (batch.lengths, batch.live, batch.phase, batch.arm, None)
    conversion = remap_op.operator_arguments(remap)
    return {
        "topology_policy": tuple(policy),
        "lift_structural_scores": (batch.scores, *rows, table.rows, table.enabled, SHAPE.width),
        "remap_grouped": conversion,
        "policy_and_remap": (*policy, *conversion[1:]),
    }
