"""The fused form as what it stands for: the policy's reference, and then the remap's."""

from __future__ import annotations

from kvplugin.fused.call import FusedCall
from kvplugin.remap import reference as remap
from kvplugin.topology import reference as topology
from kvplugin.topology.arms import apply_arms_into


def fused_into(call: FusedCall) -> None:
    """Rewrite the rows and translate them; see :func:`kvplugin.fused.op.apply_and_remap`."""
    apply_arms_into(topology, call.policy)
    remap.remap_into(call.remap)
