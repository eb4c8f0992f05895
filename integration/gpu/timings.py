"""How long the forms take beside each other, beside torch.topk and beside a copy of the same bytes.

Aims are reported as met or missed, and fail nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from integration.gpu.batches import BLOCK_SIZE, GROUP, MEMBERS, Shape
from integration.gpu.measure import REPEATS, Contestant, medians_us
from integration.gpu.record import Record, Value
from kvplugin.config import Mode, PolicyConfig
from kvplugin.fused import apply_and_remap
from kvplugin.remap import remap_grouped
from kvplugin.topology import PolicyTable, apply_topology_policy, lift_structural_scores, lower, new_counters

WIDTH = 2048
LENGTH = 32768
STRIPES = 64
ROWS = {1: 20, 64: 20, 8192: 4}
"""Rows of a call, and steps in one graph of it."""

TOPK_ROWS = 64
POLICY = PolicyConfig(mode=Mode.SPARSE_MERGE)
"""What an operator gets who sets nothing but the mode."""

METHOD = (
    f"Median of {REPEATS} replays of captured graphs, by turns, divided by the steps in a graph ({ROWS}, by rows); "
    f"K = {WIDTH}, L = {LENGTH}, {GROUP} layers, blocks of {BLOCK_SIZE} tokens, no valid counts; indices are int32, "
    "beside torch.topk its own int64; the L2 cache is not flushed: the inputs have just been written, as the kernel "
    "before would have done; at 8192 rows they exceed it"
)


class Aim(NamedTuple):
    """A ratio of two medians, and what it should not exceed."""

    above: str
    below: str
    at_most: float


AIMS = (
    Aim("torch.topk + fused, T=64", "torch.topk + grouped remap, T=64", 1.15),
    Aim("lift + torch.topk, T=64", "torch.topk, T=64", 1.05),
    Aim("grouped remap, T=1", "remap per layer, T=1", 0.4),
    Aim("grouped remap, T=8192", "copy of the remap's bytes, T=8192", 2.0),
)


def run(record: Record, *, tiny: bool) -> None:
    device = torch.device("cuda")
    record.fact("method", METHOD)
    medians: dict[str, float] = {}
    for rows, steps in ROWS.items():
        contestants = Step(Shape(rows, WIDTH, LENGTH), steps, device).contestants()
        medians |= medians_us(contestants, steps, device)
        record.fact("medians_us", dict(medians))
        record.fact("aims", judged(medians))
        torch.cuda.empty_cache()


def judged(medians: Mapping[str, float]) -> list[dict[str, Value]]:
    """Every aim whose times are known, with its ratio."""
    known = [aim for aim in AIMS if {aim.above, aim.below} <= medians.keys()]
    ratios = [medians[aim.above] / medians[aim.below] for aim in known]
    return [
        {
            "name": f"{aim.above} / {aim.below}",
            "ratio": round(ratio, 3),
            "at_most": aim.at_most,
            "met": ratio <= aim.at_most,
        }
        for aim, ratio in zip(known, ratios, strict=True)
    ]


class Step:
    """Buffers of the ``steps`` steps of one graph, and what may be done in each."""

    def __init__(self, shape: Shape, steps: int, device: torch.device) -> None:
        rows, width, length = shape
        random = torch.Generator(device).manual_seed(0)
        self.shape = shape
        self.scores = torch.randn(rows, length, generator=random, device=device)
        self.lifted = self.scores.clone()
        self.lengths = torch.full((rows,), length, dtype=torch.int32, device=device)
        order = torch.randperm(width, generator=random, device=device)
        self.learned = self.scores.topk(width).indices[:, order].int()
        self.topk = self.learned.repeat(steps, 1, 1)
        self.requests = torch.arange(rows, dtype=torch.int32, device=device) % 64
        table = torch.randperm(64 * -(-length // BLOCK_SIZE), generator=random, device=device)
        self.table = table.int().reshape(64, -1)
        self.physical = torch.empty(GROUP, rows, width, dtype=torch.int32, device=device)
        self.values = torch.empty(rows, width, device=device)
        self.indices = torch.empty(rows, width, dtype=torch.int64, device=device)
        self.policy = PolicyTable([lower(POLICY, width)], device)
        self.counters = new_counters(device, STRIPES, 1)
        # A copy reads what it writes, so half of the bytes that the remap reads and writes.
        self.source = torch.empty((1 + GROUP) * rows * width // 2, dtype=torch.int32, device=device)
        self.target = torch.empty_like(self.source)

    def contestants(self) -> dict[str, Contestant]:
        """Everything that is timed at this number of rows, by name."""
        found = {
            "copy of the remap's bytes": Contestant(lambda i: self.target.copy_(self.source)),
            "remap per layer": Contestant(lambda i: self.remap_per_layer(self.topk[i])),
            "grouped remap": Contestant(lambda i: self.remap(self.topk[i])),
            "policy": Contestant(lambda i: self.apply(self.topk[i]), self.restore),
            "policy, then grouped remap": Contestant(self.apply_then_remap, self.restore),
            "fused": Contestant(lambda i: self.fused(self.topk[i]), self.restore),
        }
        if self.shape.rows == TOPK_ROWS:
            found |= {
                "torch.topk": Contestant(partial(self.select, self.scores)),
                "torch.topk + grouped remap": Contestant(lambda i: self.remap(self.select(self.scores, i))),
                "torch.topk + fused": Contestant(lambda i: self.fused(self.select(self.scores, i))),
                "lift + torch.topk": Contestant(self.lift_then_select, lambda: self.lifted.copy_(self.scores)),
            }
        return {f"{name}, T={self.shape.rows}": contestant for name, contestant in found.items()}

    def restore(self) -> None:
        self.topk.copy_(self.learned)

    def select(self, scores: Tensor, i: int) -> Tensor:
        torch.topk(scores, self.shape.width, sorted=False, out=(self.values, self.indices))
        return self.indices

    def lift_then_select(self, i: int) -> None:
        lift_structural_scores(self.lifted, self.lengths, config=self.policy, width=self.shape.width)
        self.select(self.lifted, i)

    def apply(self, topk: Tensor) -> None:
        apply_topology_policy(topk, self.lengths, config=self.policy, scores=self.scores, counters=self.counters)

    def apply_then_remap(self, i: int) -> None:
        self.apply(self.topk[i])
        self.remap(self.topk[i])

    def remap(self, topk: Tensor) -> None:
        remap_grouped(topk, self.requests, self.table, **self._pool(slice(None)))

    def remap_per_layer(self, topk: Tensor) -> None:
        for layer in range(GROUP):
            remap_grouped(topk, self.requests, self.table, **self._pool(slice(layer, layer + 1)))

    def fused(self, topk: Tensor) -> None:
        apply_and_remap(
            topk,
            self.lengths,
            self.requests,
            self.table,
            config=self.policy,
            scores=self.scores,
            policy_counters=self.counters,
            **self._pool(slice(None)),
        )

    def _pool(self, layers: slice) -> dict[str, Any]:
        return {
            "block_size": BLOCK_SIZE,
            "num_blocks": self.table.numel(),
            "members": MEMBERS[layers],
            "out": self.physical[layers],
        }
