"""The steps that are captured, with everything they take, and where they write."""

from __future__ import annotations

import torch
from torch import Tensor

from integration.gpu.batches import BLOCK_SIZE, MEMBERS, NAN_INDEX, Batch, Shape
from kvplugin.fused import apply_and_remap
from kvplugin.remap import new_remap_counters, remap_grouped
from kvplugin.topology import PolicyTable, apply_topology_policy, new_counters

STRIPES = 16


class Outputs:
    """Where the fused form writes."""

    NAMES = ("physical rows", "valid counts", "policy counters", "remap counters")

    def __init__(self, shape: Shape, arms: int, device: torch.device) -> None:
        self.physical = torch.empty(len(MEMBERS), shape.rows, shape.width, dtype=torch.int32, device=device)
        self.valid = torch.empty(shape.rows, dtype=torch.int32, device=device)
        self.policy = new_counters(device, STRIPES, arms)
        self.remap = new_remap_counters(device, STRIPES)

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return self.physical, self.valid, self.policy, self.remap

    def clear(self) -> None:
        """Poison what is written in full, zero what is added to."""
        self.physical.fill_(NAN_INDEX)
        self.valid.fill_(NAN_INDEX)
        self.policy.zero_()
        self.remap.zero_()


def policy_step(batch: Batch, table: PolicyTable, counters: Tensor) -> None:
    """The policy with a table, on all that a padded batch has."""
    apply_topology_policy(
        batch.topk,
        batch.lengths,
        config=table,
        row_live=batch.live,
        row_phase=batch.phase,
        row_arm=batch.arm,
        scores=batch.scores,
        counters=counters,
    )


def fused_step(batch: Batch, table: PolicyTable, outputs: Outputs) -> None:
    """The fused form, likewise."""
    apply_and_remap(
        batch.topk,
        batch.lengths,
        batch.requests,
        batch.table,
        config=table,
        block_size=BLOCK_SIZE,
        num_blocks=batch.num_blocks,
        members=MEMBERS,
        row_live=batch.live,
        row_phase=batch.phase,
        row_arm=batch.arm,
        scores=batch.scores,
        count_valid=True,
        out=outputs.physical,
        valid_out=outputs.valid,
        policy_counters=outputs.policy,
        remap_counters=outputs.remap,
    )


def remap_step(batch: Batch, outputs: Outputs) -> None:
    """The grouped remap of the same batch."""
    remap_grouped(
        batch.topk,
        batch.requests,
        batch.table,
        block_size=BLOCK_SIZE,
        num_blocks=batch.num_blocks,
        members=MEMBERS,
        count_valid=True,
        out=outputs.physical,
        valid_out=outputs.valid,
        counters=outputs.remap,
    )
