"""Decode steps as a top-k kernel leaves them, with everything that a padded batch brings along."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from kvplugin.config import Eviction, MismatchAction, Mode, PolicyConfig, Witness
from kvplugin.remap import Member
from kvplugin.topology import PolicyParams, lower

BLOCK_SIZE = 64
GROUP = 4
MEMBERS = tuple(Member(GROUP * BLOCK_SIZE, layer * BLOCK_SIZE) for layer in range(GROUP))
"""An index group of four layers whose blocks lie side by side in one pool."""

NAN_INDEX = 2143289344
"""An index that top-k kernels emit where the logits are NaN; also poison for what must not be read or kept."""

DECODE = 1


class Shape(NamedTuple):
    """Rows (T), slots per row (K), tokens of the longest row (L)."""

    rows: int
    width: int
    longest: int


@dataclass(frozen=True)
class Batch:
    """The inputs of one step, all on one device.

    Attributes:
        topk: int32 ``[T, K]``.
        lengths: int32 ``[T]``, -1 in a padded row.
        scores: float32 ``[T, L]``, -inf beyond a row's own tokens.
        live: bool ``[T]``.
        phase: int8 ``[T]``.
        arm: int32 ``[T]``, some beyond the table.
        requests: int32 ``[T]``, garbage in padded rows.
        table: int32 ``[R, M]``.
    """

    topk: Tensor
    lengths: Tensor
    scores: Tensor
    live: Tensor
    phase: Tensor
    arm: Tensor
    requests: Tensor
    table: Tensor

    @property
    def num_blocks(self) -> int:
        return self.table.numel()

    @property
    def idle(self) -> Tensor:
        """Rows that the policy neither reads nor writes, bool ``[T]``."""
        return ~self.live | (self.lengths < 0)

    def to(self, device: torch.device) -> Self:
        """A copy on a device, also where the batch is there already."""
        return type(self)(*(getattr(self, field.name).to(device, copy=True) for field in fields(self)))

    def take(self, other: Self) -> None:
        """Copy another batch of the same shape into the memory of this one."""
        for field in fields(self):
            getattr(self, field.name).copy_(getattr(other, field.name))

    def only(self, rows: slice) -> Self:
        """A copy of some of the rows, with all requests."""
        per_row = {field.name: getattr(self, field.name) for field in fields(self) if field.name != "table"}
        return type(self)(**{name: value[rows].clone() for name, value in per_row.items()}, table=self.table)


def draw(shape: Shape, seed: int, *, arms: int = 1) -> Batch:
    """A random step on the CPU: long, short and empty rows, one with a bad index, a third of the rows padded."""
    random = torch.Generator().manual_seed(seed)
    rows, width, longest = shape

    def integers(low: int, high: int, *size: int) -> Tensor:
        return torch.randint(low, high, size, generator=random, dtype=torch.int32)

    lengths = torch.where(integers(0, 4, rows) > 0, integers(width + 1, longest + 1, rows), integers(0, width, rows))
    scores = torch.randn(rows, longest, generator=random)
    scores.masked_fill_(torch.arange(longest) >= lengths.unsqueeze(1), -torch.inf)
    best = scores.topk(width)
    topk = torch.where(best.values == -torch.inf, -1, best.indices.int())
    topk = topk[:, torch.randperm(width, generator=random)].contiguous()
    topk[seed % rows, seed % width] = NAN_INDEX
    live = integers(0, 3, rows) > 0
    lengths[integers(0, 12, rows) == 0] = -1
    requests = torch.arange(rows, dtype=torch.int32)
    blocks = -(-longest // BLOCK_SIZE)
    table = torch.randperm(rows * blocks, generator=random, dtype=torch.int32).reshape(rows, blocks)
    idle = ~live | (lengths < 0)
    garbage = torch.tensor([NAN_INDEX, -1, -(2**31), rows], dtype=torch.int32)
    requests[idle] = garbage[integers(0, len(garbage), int(idle.sum()))]
    phase = integers(0, 2, rows).to(torch.int8)
    return Batch(topk, lengths, scores, live, phase, integers(0, arms + (arms > 1), rows), requests, table)


def policies(width: int) -> list[PolicyParams]:
    """One policy of every kind that takes another way through the kernels, scaled to the width."""
    windows: dict[str, Any] = {
        "sink_tokens": max(1, width // 64),
        "local_tokens": max(1, width // 32),
        "block_size": max(1, width // 64),
    }
    merge = PolicyConfig(mode=Mode.SPARSE_MERGE, witness_blocks=4, **windows)
    coverage = PolicyConfig(
        mode=Mode.SPARSE_MERGE, witness=Witness.COVERAGE, coverage_segments=min(64, width // 32), **windows
    )
    others = [
        merge.model_copy(update={"coordinate_mismatch": MismatchAction.DROP}),
        coverage,
        PolicyConfig(mode=Mode.ONLY, **windows),
        PolicyConfig(mode=Mode.SPARSE_MERGE, eviction=Eviction.OLDEST, **windows),
        PolicyConfig(mode=Mode.OBSERVE, **windows),
    ]
    return [lower(config, width) for config in (merge, *others)]


def liftable(width: int) -> list[PolicyParams]:
    """Policies that a lift of scores can express."""
    return [
        params
        for params in policies(width)
        if params.mode.merges and params.witness is Witness.UNIFORM and params.needs_scores
    ]
