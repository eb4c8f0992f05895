"""A batch as a layer of an engine sees it, and what its indices must become."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from kvplugin.remap import Member, remap_grouped
from kvplugin.remap.groups import GroupLayout
from kvplugin.remap.layer_call import LayerCall
from kvplugin.remap.memo import GroupMemo
from kvplugin.remap.paths import RemapPath, new_path_counters

BLOCK, PAGES = 4, 50
NEAR = Member(BLOCK)


@dataclass
class Batch:
    """Rows of some requests; ``refill`` is what a new selection does, in place."""

    seed: int = 0
    rows: int = 5
    width: int = 8
    requests: int = 3
    tensors: tuple[Tensor, Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        topk = torch.empty(self.rows, self.width, dtype=torch.int32)
        request_of_row = torch.arange(self.rows) % self.requests
        self.tensors = (topk, request_of_row, torch.empty(self.requests, 6, dtype=torch.int32))
        self.refill()

    def refill(self) -> None:
        """Other selections and other pages at the same addresses."""
        topk, _, table = self.tensors
        topk.random_(-1, 6 * BLOCK, generator=self.random)
        table.random_(0, PAGES, generator=self.random)

    def call(self, step: int, layer: int, member: Member = NEAR) -> LayerCall:
        """What a layer asks for in a step."""
        return LayerCall(step, layer, member, *self.tensors, block_size=BLOCK, num_blocks=PAGES)


def converted(call: LayerCall) -> Tensor:
    """The call's indices, converted for it alone."""
    return remap_grouped(
        call.topk,
        call.request_of_row,
        call.block_table,
        block_size=call.block_size,
        num_blocks=call.num_blocks,
        members=[call.member],
    ).physical[0]


class Layers:
    """A memo, its counters, and calls that are checked at once."""

    def __init__(self, layout: GroupLayout, *, grouped: bool = True) -> None:
        self.counters = new_path_counters()
        self.memo = GroupMemo(lambda: layout, grouped=grouped, paths=self.counters)

    def run(self, call: LayerCall) -> Tensor:
        """Convert; fail where the result is not that of a conversion of its own."""
        found, expected = self.memo.convert(call), converted(call)
        different = (found != expected).nonzero().tolist()
        assert not different, f"layer {call.layer}, row {different[0][0]}, slot {different[0][1]} of {len(different)}"
        return found

    def paths(self) -> dict[str, int]:
        """What was counted since the last look, without zeros."""
        found = {path.name.lower(): count for path, count in zip(RemapPath, self.counters.tolist(), strict=True)}
        self.counters.zero_()
        return {path: count for path, count in found.items() if count}
