"""The fused form's public function, its registered operator, and the choice of implementation by device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvplugin.errors import ArgumentError
from kvplugin.forms import form_for
from kvplugin.fused.call import FusedCall
from kvplugin.remap import op as remap_op
from kvplugin.remap.call import Member
from kvplugin.topology import op as topology_op
from kvplugin.topology.op import Policies


@cache
def implementation_for(device_type: str) -> ModuleType:
    """The module that serves a device: one launch on GPUs, one pass per row on the CPU; elsewhere the two parts."""
    return form_for(device_type, "kvplugin.fused", "separate", "policy and remap run one by one")


def apply_and_remap(
    topk: Tensor,
    row_lengths: Tensor,
    request_of_row: Tensor,
    block_table: Tensor,
    *,
    config: Policies,
    block_size: int,
    num_blocks: int,
    members: Sequence[Member],
    row_live: Tensor | None = None,
    row_phase: Tensor | None = None,
    row_arm: Tensor | None = None,
    scores: Tensor | None = None,
    score_start: Tensor | None = None,
    witness_scores: Tensor | None = None,
    count_valid: bool = False,
    out: Tensor | None = None,
    valid_out: Tensor | None = None,
    policy_counters: Tensor | None = None,
    remap_counters: Tensor | None = None,
    error: Tensor | None = None,
) -> remap_op.Remapped:
    """Rewrite a batch's learned top-k in place and translate the selection into physical rows, in one launch.

    Equals :func:`kvplugin.topology.apply_topology_policy`, then :func:`kvplugin.remap.remap_grouped`: rows that the
    policy leaves alone are translated as they are. For decode rows with logical indices on one context-parallel rank.

    Args:
        topk: int32 or int64 ``[T, K]``, any strides.
        row_lengths, config, row_live, row_phase, row_arm, scores, score_start, witness_scores, error: as the policy
            takes them.
        request_of_row, block_table, block_size, num_blocks, members, count_valid, out, valid_out: as the remap takes
            them.
        policy_counters, remap_counters: counter buffers of the two parts; default none for the remap, a new one for the
            policy.

    Returns:
        ``(physical, valid)``: int32 ``[G, T, K]`` and int32 ``[T]`` or None.

    Raises:
        ArgumentError: as the two parts do.
    """
    where = "apply_and_remap"
    if topk.dim() != 2:
        raise ArgumentError(f"{where}.topk", f"got {topk.dim()} dimensions", "must be [T, K]")
    policy = topology_op.checked_call(
        where,
        topk,
        row_lengths,
        config=config,
        row_live=row_live,
        row_phase=row_phase,
        row_arm=row_arm,
        scores=scores,
        score_start=score_start,
        witness_scores=witness_scores,
        counters=policy_counters,
        counters_name="policy_counters",
        error=error,
    )
    remap = remap_op.checked_call(
        where,
        topk,
        request_of_row,
        block_table,
        block_size=block_size,
        num_blocks=num_blocks,
        members=members,
        count_valid=count_valid,
        out=out,
        valid_out=valid_out,
        counters=remap_counters,
        counters_name="remap_counters",
    )
    torch.ops.kvplugin.policy_and_remap(*policy, *remap_op.operator_arguments(remap)[1:])
    return remap_op.Remapped(remap.physical, remap.valid)


def _run(*arguments: Any) -> None:
    """The registered operator on a real device."""
    policy = topology_op.operator_call(*arguments[:POLICY_ARGUMENTS])
    remap = remap_op.operator_call(policy.topk, *arguments[POLICY_ARGUMENTS:])
    if remap.physical.numel() > 0:
        implementation_for(policy.topk.device.type).fused_into(FusedCall(policy, remap))
        return
    torch.ops.kvplugin.topology_policy(*policy)
    if remap.valid is not None:
        remap.valid.zero_()


# Library.define and impl rather than custom_op, whose wrapper costs several times as much at each call.
_LIBRARY = torch.library.Library("kvplugin", "FRAGMENT")  # type: ignore[no-untyped-call]
POLICY_ARGUMENTS = len(topology_op.POLICY_SCHEMA.split(","))
_LIBRARY.define(  # type: ignore[no-untyped-call]
    f"policy_and_remap({topology_op.POLICY_SCHEMA}, {remap_op.REMAP_SCHEMA}) -> ()"
)
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("policy_and_remap", _run, _key)  # type: ignore[no-untyped-call]
# Tracing needs no more than the arguments: every result is one of them.
torch.library.register_fake("kvplugin::policy_and_remap", lambda *arguments: None, lib=_LIBRARY)
