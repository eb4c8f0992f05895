"""What the references make of a batch, on the CPU, and how results are compared with it."""

from __future__ import annotations

import torch
from torch import Tensor

from integration.gpu.batches import BLOCK_SIZE, MEMBERS, Batch
from kvplugin.remap import reference as remap_reference
from kvplugin.remap.call import NO_CONTEXT_PARALLEL, RemapCall
from kvplugin.remap.counters import new_remap_counters
from kvplugin.topology import PolicyTable, new_counters
from kvplugin.topology import reference as policy_reference
from kvplugin.topology.arms import apply_arms_into, lift_arms_into
from kvplugin.topology.call import ArmsCall, LiftArmsCall


def expected_policy(batch: Batch, table: PolicyTable) -> tuple[Tensor, Tensor]:
    """Rows ``[T, K]`` after the policy, and what it counts ``[arms, 2, len(Counter)]``; ``batch`` is on the CPU."""
    counters = new_counters("cpu", 1, len(table.rows))
    call = ArmsCall(
        topk=batch.topk.clone(),
        row_lengths=batch.lengths,
        row_live=batch.live,
        row_phase=batch.phase,
        row_arm=batch.arm,
        offsets=None,
        scores=batch.scores,
        score_start=None,
        witness_scores=None,
        policies=table.rows.cpu(),
        enabled=table.enabled.cpu(),
        listed_witnesses=table.listed_witnesses,
        counters=counters,
        error=None,
    )
    apply_arms_into(policy_reference, call)
    return call.topk, counters[0]


def expected_lift(batch: Batch, table: PolicyTable) -> Tensor:
    """The scores ``[T, L]`` after a lift; ``batch`` is on the CPU."""
    scores = batch.scores.clone()
    rows = (batch.lengths, batch.live, batch.phase, batch.arm, None)
    lift_arms_into(policy_reference, LiftArmsCall(scores, *rows, table.rows.cpu(), table.enabled.cpu(), table.width))
    return scores


def expected_remap(topk: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Physical rows ``[G, T, K]``, valid counts ``[T]`` and counters of some rows; all on the CPU."""
    call = RemapCall(
        topk=topk,
        request_of_row=batch.requests,
        block_table=batch.table,
        members=torch.tensor(MEMBERS),
        block_size=BLOCK_SIZE,
        num_blocks=batch.num_blocks,
        compact=False,
        context_parallel=NO_CONTEXT_PARALLEL,
        workspace=None,
        physical=torch.empty(len(MEMBERS), *topk.shape, dtype=torch.int32),
        valid=torch.empty(len(topk), dtype=torch.int32),
        counters=new_remap_counters(stripes=1),
    )
    remap_reference.remap_into(call)
    assert call.valid is not None
    assert call.counters is not None
    return call.physical, call.valid, call.counters[0]


def require_equal(what: str, found: Tensor, wanted: Tensor) -> None:
    """Fail, with the first place that differs and both values, unless two tensors hold the same."""
    found, wanted = found.cpu(), wanted.cpu()
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        shapes = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in (found, wanted)]
        raise AssertionError(f"{what}: {shapes[0]}, expected {shapes[1]}")
    places = (found != wanted).nonzero()
    if len(places):
        place = tuple(places[0].tolist())
        values = f"{found[place].item()}, expected {wanted[place].item()}"
        raise AssertionError(f"{what}{list(place)}: {values} ({len(places)} of {found.numel()} differ)")


def require_same_sets(what: str, found: Tensor, wanted: Tensor) -> None:
    """The same for rows whose slots have no order; places are those of the sorted rows."""
    require_equal(f"{what}, in ascending order, ", found.cpu().sort(-1).values, wanted.cpu().sort(-1).values)
