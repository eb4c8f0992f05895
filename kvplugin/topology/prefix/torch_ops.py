"""The stable-prefix count in vectorised torch, on any device; it waits for none and can be captured in a graph."""

from __future__ import annotations

import torch

from kvplugin.topology.prefix.call import PrefixCall


def count_into(call: PrefixCall) -> None:
    """Add to ``call.counters``."""
    arms, phases, columns = call.counters.shape
    visible = torch.minimum(call.row_prefix.long(), call.row_lengths.long()).clamp_min(0)
    arm = torch.zeros_like(visible) if call.row_arm is None else call.row_arm.long()
    counted = (visible > 0) & (arm >= 0) & (arm < arms)
    if call.row_live is not None:
        counted &= call.row_live
    arm = arm.clamp(0, arms - 1)
    counted &= call.counting[arm] != 0
    phase = torch.ones_like(visible) if call.row_phase is None else (call.row_phase != 0).long()
    selected = ((call.selection >= 0) & (call.selection < visible[:, None])).sum(1)
    found = torch.stack([torch.ones_like(visible), visible, visible - selected], dim=1) * counted[:, None]
    call.counters.view(arms * phases, columns).index_add_(0, arm * phases + phase, found)
