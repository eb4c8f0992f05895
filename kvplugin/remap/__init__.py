"""Logical to physical: from a row's token positions to rows of the KV pools, once per index group."""

from kvplugin.remap.call import ContextParallel, Member, PrefillWorkspace
from kvplugin.remap.counters import RemapCounter, new_remap_counters
from kvplugin.remap.op import Remapped, remap_grouped

__all__ = [
    "ContextParallel",
    "Member",
    "PrefillWorkspace",
    "RemapCounter",
    "Remapped",
    "new_remap_counters",
    "remap_grouped",
]
