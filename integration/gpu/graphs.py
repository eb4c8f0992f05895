"""Captured CUDA graphs: every input, policy and switch changes in place between replays, and each replay is checked."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from integration.gpu.batches import Batch, Shape, draw, liftable, policies
from integration.gpu.capture import replayable
from integration.gpu.expected import (
    expected_lift,
    expected_policy,
    expected_remap,
    require_equal,
    require_same_sets,
)
from integration.gpu.record import Record
from integration.gpu.steps import STRIPES, Outputs, fused_step, policy_step, remap_step
from kvplugin.topology import PolicyParams, PolicyTable, lift_structural_scores, new_counters

SHAPES = (Shape(17, 2048, 32768), Shape(65, 64, 1000), Shape(1, 64, 1000))
"""The references take their time: 50 ms for each row of 2048 slots."""

ALONE = Shape(65, 2048, 8192)
STEPS = 6
RELAUNCHES = 20
BATCHES = (1, 64, 65)


def run(record: Record, *, tiny: bool) -> None:
    device = torch.device("cuda")
    for shape in SHAPES:
        for scenario in (policy_follows, lift_follows, remap_follows, fused_follows, relaunches_are_equal):
            name = f"{scenario.__name__} T={shape.rows} K={shape.width} L={shape.longest}"
            record.check(name, partial(scenario, shape, device))
    record.check("rows_stand_alone", partial(rows_stand_alone, ALONE, device))


def policy_follows(shape: Shape, device: torch.device) -> None:
    """Policy with a table: rows, counters of every arm, and rows that must stay as they are."""
    arms = policies(shape.width)
    table = PolicyTable(arms, device)
    static = draw(shape, 0, arms=len(arms)).to(device)
    counters = new_counters(device, STRIPES, len(arms))
    replay = replayable(partial(policy_step, static, table, counters), device)
    counters.zero_()
    total = torch.zeros_like(counters[0], device="cpu")
    for step in range(STEPS):
        fresh = _next_step(step, shape, static, table, arms)
        replay()
        rows, counts = expected_policy(fresh, table)
        total += counts
        _require_rows(step, static.topk, rows, fresh)
        require_equal(f"step {step}: policy counters", counters.sum(0), total)


def lift_follows(shape: Shape, device: torch.device) -> None:
    """Lift of scores, then torch.topk: scores bit for bit, and the best of them."""
    arms = liftable(shape.width)
    table = PolicyTable(arms, device)
    static = draw(shape, 0, arms=len(arms)).to(device)
    values = torch.empty(shape.rows, shape.width, device=device)
    indices = torch.empty(shape.rows, shape.width, dtype=torch.int64, device=device)

    def lift_and_select() -> None:
        rows = {"row_live": static.live, "row_phase": static.phase, "row_arm": static.arm}
        lift_structural_scores(static.scores, static.lengths, config=table, width=shape.width, **rows)
        torch.topk(static.scores, shape.width, sorted=False, out=(values, indices))

    replay = replayable(lift_and_select, device)
    for step in range(STEPS):
        fresh = _next_step(step, shape, static, table, arms)
        replay()
        scores = expected_lift(fresh, table)
        require_equal(f"step {step}: lifted scores", static.scores, scores)
        require_same_sets(f"step {step}: best scores", values, scores.topk(shape.width).values)
        require_equal(f"step {step}: scores of the indices", static.scores.gather(1, indices), values)


def remap_follows(shape: Shape, device: torch.device) -> None:
    """Grouped remap: rows of all members, valid counts and counters, with request ids that do not exist."""
    static = draw(shape, 0).to(device)
    outputs = Outputs(shape, 1, device)
    replay = replayable(partial(remap_step, static, outputs), device)
    outputs.clear()
    total = torch.zeros_like(outputs.remap[0], device="cpu")
    for step in range(STEPS):
        fresh = draw(shape, step + 1)
        static.take(fresh)
        replay()
        rows, counts, faults = expected_remap(fresh.topk, fresh)
        total += faults
        require_equal(f"step {step}: physical rows", outputs.physical, rows)
        require_equal(f"step {step}: valid counts", outputs.valid, counts)
        require_equal(f"step {step}: remap counters", outputs.remap.sum(0), total)


def fused_follows(shape: Shape, device: torch.device) -> None:
    """Fused form: the policy's rows, and the physical rows of exactly these, slot by slot."""
    arms = policies(shape.width)
    table = PolicyTable(arms, device)
    static = draw(shape, 0, arms=len(arms)).to(device)
    outputs = Outputs(shape, len(arms), device)
    replay = replayable(partial(fused_step, static, table, outputs), device)
    outputs.clear()
    total, faults = (torch.zeros_like(part[0], device="cpu") for part in (outputs.policy, outputs.remap))
    for step in range(STEPS):
        fresh = _next_step(step, shape, static, table, arms)
        replay()
        rows, counts = expected_policy(fresh, table)
        physical, valid, refused = expected_remap(static.topk.cpu(), fresh)
        total, faults = total + counts, faults + refused
        _require_rows(step, static.topk, rows, fresh)
        require_equal(f"step {step}: physical rows", outputs.physical, physical)
        require_equal(f"step {step}: valid counts", outputs.valid, valid)
        require_equal(f"step {step}: policy counters", outputs.policy.sum(0), total)
        require_equal(f"step {step}: remap counters", outputs.remap.sum(0), faults)


def relaunches_are_equal(shape: Shape, device: torch.device) -> None:
    """The same inputs give the same bytes, order of slots and counters included, at every launch."""
    arms = policies(shape.width)
    table = PolicyTable(arms, device)
    inputs = draw(shape, 1, arms=len(arms))
    static, outputs = inputs.to(device), Outputs(shape, len(arms), device)
    replay = replayable(partial(fused_step, static, table, outputs), device)
    first: tuple[Tensor, ...] = ()
    for launch in range(1 + RELAUNCHES):
        static.take(inputs)
        outputs.clear()
        replay()
        found = (static.topk.clone(), *(part.clone() for part in outputs.parts))
        first = first or found
        for name, now, then in zip(("selection", *Outputs.NAMES), found, first, strict=True):
            require_equal(f"launch {launch}: {name}", now, then)


def rows_stand_alone(shape: Shape, device: torch.device) -> None:
    """A row gives the same bytes alone as among others, whatever their number."""
    arms = policies(shape.width)
    table = PolicyTable(arms, device)
    whole = draw(shape, 2, arms=len(arms))

    def results(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        part = whole.only(rows).to(device)
        outputs = Outputs(Shape(len(part.topk), shape.width, shape.longest), len(arms), device)
        fused_step(part, table, outputs)
        return part.topk, outputs.physical.transpose(0, 1), outputs.valid

    each = (results(slice(row, row + 1)) for row in range(shape.rows))
    alone = [torch.cat(parts) for parts in zip(*each, strict=True)]
    for size in BATCHES:
        together = results(slice(size))
        for name, found, wanted in zip(("selection", "physical rows", "valid counts"), together, alone, strict=True):
            require_equal(f"batch of {size}: {name}", found, wanted[:size])


def _next_step(step: int, shape: Shape, static: Batch, table: PolicyTable, arms: list[PolicyParams]) -> Batch:
    """New inputs in the captured memory, every arm with another policy, and the switch off in one step of three."""
    for arm in range(len(arms)):
        table.set_arm(arm, arms[(arm + step) % len(arms)])
    table.switch(on=step % 3 != 2)
    fresh = draw(shape, step + 1, arms=len(arms))
    static.take(fresh)
    return fresh


def _require_rows(step: int, found: Tensor, wanted: Tensor, fresh: Batch) -> None:
    found = found.cpu()
    require_same_sets(f"step {step}: selection", found, wanted)
    require_equal(f"step {step}: rows to leave alone", found[fresh.idle], fresh.topk[fresh.idle])
