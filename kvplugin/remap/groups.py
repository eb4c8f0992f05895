"""Index groups: which layers share one top-k, and which groups can share one conversion."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from functools import cached_property
from typing import NamedTuple

from kvplugin.remap.call import Member


@unique
class GroupKind(StrEnum):
    """What holds a group together."""

    TARGET = "target"
    """A layer of the model that runs the indexer, and those after it that reuse its top-k."""
    ORPHAN = "orphan"
    """A layer that reuses a top-k of which this pipeline stage has no indexer."""
    MTP = "mtp"
    """A draft layer. It runs its own indexer, whatever the pattern says, at its own steps."""


@unique
class Inactive(StrEnum):
    """Why each layer of a group converts for itself."""

    SINGLETON = "singleton"
    ORPHAN = "orphan"
    PLACEMENT_UNKNOWN = "placement_unknown"
    BLOCK_SIZES_DIFFER = "block_sizes_differ"
    BLOCK_TABLES_DIFFER = "block_tables_differ"


class Placement(NamedTuple):
    """Where the KV rows of a layer lie.

    Attributes:
        member: the layer's rows in its flat KV pool.
        block_size: tokens per block.
        table: equal for layers that read the same block table.
    """

    member: Member
    block_size: int
    table: Hashable


@dataclass(frozen=True)
class IndexGroup:
    """Layers that attend to one top-k.

    Attributes:
        kind: what holds them together.
        layers: layer numbers in the order in which they run; the leader first.
        inactive: why they do not share a conversion; None = they do.
        members: the distinct placements of the layers, the leader's first; empty = not known before the call.
    """

    kind: GroupKind
    layers: tuple[int, ...]
    inactive: Inactive | None = None
    members: tuple[Member, ...] = ()

    @property
    def leader(self) -> int | None:
        """The layer whose indexer the group follows; None for an orphan."""
        return None if self.kind is GroupKind.ORPHAN else self.layers[0]


@dataclass(frozen=True)
class GroupLayout:
    """All index groups of one pipeline stage, in the order of their layers; every layer is in exactly one."""

    groups: tuple[IndexGroup, ...]

    @property
    def inert(self) -> bool:
        """True where no two layers can share a conversion."""
        return all(group.inactive is not None for group in self.groups)

    @property
    def conversions(self) -> int:
        """Conversions of one step that runs every layer once."""
        return sum(1 if group.inactive is None else len(group.layers) for group in self.groups)

    def group_of(self, layer: int) -> IndexGroup | None:
        """The group of a layer, or None for a layer that the layout does not know."""
        return self._by_layer.get(layer)

    def placed(self, placements: Mapping[int, Placement]) -> GroupLayout:
        """The same groups, knowing where their layers' rows lie: those that cannot share a conversion are inactive.

        Layers with different members may share one: each distinct member becomes a row of the group's result.
        """
        return GroupLayout(tuple(_place(group, placements) for group in self.groups))

    @cached_property
    def _by_layer(self) -> dict[int, IndexGroup]:
        return {layer: group for group in self.groups for layer in group.layers}


def _place(group: IndexGroup, placements: Mapping[int, Placement]) -> IndexGroup:
    if group.kind is GroupKind.ORPHAN or len(group.layers) < 2:
        return group
    known = [placements[layer] for layer in group.layers if layer in placements]
    members = tuple(dict.fromkeys(placement.member for placement in known))
    if len(known) < len(group.layers):
        return replace(group, inactive=Inactive.PLACEMENT_UNKNOWN, members=())
    if len({placement.block_size for placement in known}) > 1:
        return replace(group, inactive=Inactive.BLOCK_SIZES_DIFFER, members=())
    if len({placement.table for placement in known}) > 1:
        return replace(group, inactive=Inactive.BLOCK_TABLES_DIFFER, members=())
    return replace(group, inactive=None, members=members)
