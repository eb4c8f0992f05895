"""Logical to physical: from a row's token positions to rows of the KV pools, once per index group."""

from kvplugin.remap.call import ContextParallel, Member, PrefillWorkspace
from kvplugin.remap.counters import RemapCounter, new_remap_counters
from kvplugin.remap.groups import GroupLayout, IndexGroup, Placement
from kvplugin.remap.layer_call import LayerCall
from kvplugin.remap.layouts import layout_from_config, layout_from_mask
from kvplugin.remap.memo import GroupMemo
from kvplugin.remap.op import Remapped, remap_grouped
from kvplugin.remap.paths import RemapPath, new_path_counters

__all__ = [
    "ContextParallel",
    "GroupLayout",
    "GroupMemo",
    "IndexGroup",
    "LayerCall",
    "Member",
    "Placement",
    "PrefillWorkspace",
    "RemapCounter",
    "RemapPath",
    "Remapped",
    "layout_from_config",
    "layout_from_mask",
    "new_path_counters",
    "new_remap_counters",
    "remap_grouped",
]
