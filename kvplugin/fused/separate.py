"""The two parts one after the other, each in its fastest form: where there is no form that does both in one pass."""

from __future__ import annotations

from kvplugin.fused.call import FusedCall
from kvplugin.remap import op as remap_op
from kvplugin.topology import op as topology_op
from kvplugin.topology.arms import apply_arms_into


def fused_into(call: FusedCall) -> None:
    """Rewrite the rows and translate them; see :func:`kvplugin.fused.op.apply_and_remap`."""
    device = call.policy.topk.device.type
    apply_arms_into(topology_op.implementation_for(device), call.policy)
    remap_op.implementation_for(device).remap_into(call.remap)
