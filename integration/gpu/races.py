"""Rows are rewritten in place, and the fused form reads what it just wrote: many programs at once, many times.

A thread that reads a slot after another has written it would change a row in some launch; every launch is compared with
the first, byte for byte, and the first with the torch form.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from integration.gpu.batches import BLOCK_SIZE, MEMBERS, Shape, policies
from integration.gpu.expected import require_equal, require_same_sets
from integration.gpu.record import Record
from kvplugin.config import Witness
from kvplugin.fused import apply_and_remap
from kvplugin.remap import remap_grouped
from kvplugin.topology import PolicyParams, PolicyTable, apply_topology_policy, new_counters, torch_ops
from kvplugin.topology.call import PolicyCall

REPEATS = 50
CASES = (
    (Shape(8192, 2048, 16384), Witness.UNIFORM),
    (Shape(8192, 2048, 16384), Witness.COVERAGE),
    (Shape(2048, 8192, 16384), Witness.UNIFORM),
)
"""Rows of one tile, with a closed form and with a list of witnesses, and rows of two tiles: these are read again after
parts of them have been written."""


class Rows(NamedTuple):
    """Learned rows ``[T, K]``, their scores ``[T, L]`` and lengths ``[T]``, and the tables of one request a row."""

    topk: Tensor
    scores: Tensor
    lengths: Tensor
    requests: Tensor
    table: Tensor


def run(record: Record, *, tiny: bool) -> None:
    for shape, witness in CASES:
        rows, params = draw_rows(shape, torch.device("cuda")), policy_with(witness, shape.width)
        name = f"T={shape.rows} K={shape.width} {witness}"
        record.check(f"policy, {name}", partial(policy_never_changes, rows, params))
        record.check(f"fused, {name}", partial(fused_never_changes, rows, params))


def policy_with(witness: Witness, width: int) -> PolicyParams:
    """The first policy that has such witnesses."""
    return next(params for params in policies(width) if params.witness is witness)


def draw_rows(shape: Shape, device: torch.device) -> Rows:
    """Made on the device, where they are large; slots in no order."""
    random = torch.Generator(device).manual_seed(0)
    scores = torch.randn(shape.rows, shape.longest, generator=random, device=device)
    order = torch.randperm(shape.width, generator=random, device=device)
    blocks = -(-shape.longest // BLOCK_SIZE)
    return Rows(
        scores.topk(shape.width).indices[:, order].int(),
        scores,
        torch.full((shape.rows,), shape.longest, dtype=torch.int32, device=device),
        torch.arange(shape.rows, dtype=torch.int32, device=device),
        torch.randperm(shape.rows * blocks, generator=random, device=device).int().reshape(shape.rows, blocks),
    )


def policy_never_changes(rows: Rows, params: PolicyParams) -> None:
    table = PolicyTable([params], rows.topk.device)

    def launch(topk: Tensor) -> tuple[Tensor, ...]:
        counters = new_counters(topk.device)
        apply_topology_policy(topk, rows.lengths, config=table, scores=rows.scores, counters=counters)
        return topk, counters

    topk, counters = _repeat(launch, rows.topk)
    wanted, counts = _torch_form(rows, params)
    require_same_sets("selection", topk, wanted)
    require_equal("counters", counters, counts)


def fused_never_changes(rows: Rows, params: PolicyParams) -> None:
    table = PolicyTable([params], rows.topk.device)
    pool: dict[str, Any] = {"block_size": BLOCK_SIZE, "num_blocks": rows.table.numel(), "members": MEMBERS}
    physical = torch.empty(len(MEMBERS), *rows.topk.shape, dtype=torch.int32, device=rows.topk.device)

    def launch(topk: Tensor) -> tuple[Tensor, ...]:
        apply_and_remap(
            topk,
            rows.lengths,
            rows.requests,
            rows.table,
            config=table,
            scores=rows.scores,
            out=physical.fill_(-2),
            **pool,
        )
        return topk, physical

    topk, found = _repeat(launch, rows.topk)
    require_equal("physical rows", found, remap_grouped(topk, rows.requests, rows.table, **pool).physical)


def _repeat(launch: Callable[[Tensor], tuple[Tensor, ...]], learned: Tensor) -> tuple[Tensor, ...]:
    """The results of the first of many launches on the same rows, to which all others must be equal."""
    first = tuple(part.clone() for part in launch(learned.clone()))
    topk = torch.empty_like(learned)
    for number in range(1, 1 + REPEATS):
        topk.copy_(learned)
        found = launch(topk)
        # Compared on the device; to name the place is for a failure.
        if not all(torch.equal(now, then) for now, then in zip(found, first, strict=True)):
            for now, then in zip(found, first, strict=True):
                require_equal(f"launch {number}", now, then)
    return first


def _torch_form(rows: Rows, params: PolicyParams) -> tuple[Tensor, Tensor]:
    counters = new_counters(rows.topk.device)
    call = PolicyCall(
        topk=rows.topk.clone(),
        row_lengths=rows.lengths,
        row_live=None,
        row_phase=None,
        offsets=None,
        scores=rows.scores,
        score_start=None,
        witness_scores=None,
        params=params,
        counters=counters,
        error=None,
    )
    torch_ops.apply_into(call)
    return call.topk, counters
