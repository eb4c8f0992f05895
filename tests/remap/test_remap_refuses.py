"""Arguments that ``remap_grouped`` refuses, with the exact message."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kvplugin.errors import ArgumentError
from kvplugin.remap import ContextParallel, Member, PrefillWorkspace, RemapCounter, Remapped, remap_grouped

INTS = torch.int32
COLUMNS = len(RemapCounter)


def remap(**changes: Any) -> Remapped:
    """Two rows of four slots of one request each, two members, with some arguments replaced."""
    arguments: dict[str, Any] = {
        "topk": torch.tensor([[5, 4, 3, -1]] * 2, dtype=INTS),
        "request_of_row": torch.tensor([0, 1], dtype=INTS),
        "block_table": torch.tensor([[2, 0], [1, 3]], dtype=INTS),
        "block_size": 4,
        "num_blocks": 4,
        "members": [Member(4), Member(8, 4)],
    } | changes
    return remap_grouped(**arguments)


def workspace(request_of_row: Any = (0, -1), starts: Any = (0,), rank_stride: int = 0) -> dict[str, Any]:
    tensors = (torch.as_tensor(values, dtype=INTS) for values in (request_of_row, starts))
    return {"workspace": PrefillWorkspace(*tensors, rank_stride)}


ELSEWHERE = torch.zeros(2, dtype=INTS, device="meta")
ANY = "must be int32 or int64"
REFUSED = [
    ({"topk": torch.zeros(2, 4)}, f"topk: got float32 [2, 4] on cpu; {ANY} [T, K] on cpu"),
    ({"topk": torch.zeros(2, 4).short()}, f"topk: got int16 [2, 4] on cpu; {ANY} [T, K] on cpu"),
    ({"topk": torch.zeros(2, 1, 4).int()}, f"topk: got int32 [2, 1, 4] on cpu; {ANY} [T, K] on cpu"),
    ({"request_of_row": torch.zeros(3).int()}, f"request_of_row: got int32 [3] on cpu; {ANY} [2] on cpu"),
    ({"request_of_row": torch.zeros(2)}, f"request_of_row: got float32 [2] on cpu; {ANY} [2] on cpu"),
    ({"request_of_row": torch.zeros(2, 1).int()}, f"request_of_row: got int32 [2, 1] on cpu; {ANY} [2] on cpu"),
    ({"request_of_row": ELSEWHERE}, f"request_of_row: got int32 [2] on meta; {ANY} [2] on cpu"),
    ({"block_table": torch.zeros(2).int()}, f"block_table: got int32 [2] on cpu; {ANY} [R, M] on cpu"),
    ({"block_table": torch.zeros(2, 2)}, f"block_table: got float32 [2, 2] on cpu; {ANY} [R, M] on cpu"),
    ({"block_size": 0}, "block_size: got 0; must be in [1, 2147483647]"),
    ({"block_size": 2**31}, "block_size: got 2147483648; must be in [1, 2147483647]"),
    ({"num_blocks": -1}, "num_blocks: got -1; must be in [0, 2147483647]"),
    ({"members": [Member(4), Member(3)]}, "members[1].stride_rows: got 3; must be in [4, 2147483647]"),
    ({"members": [Member(2**31)]}, "members[0].stride_rows: got 2147483648; must be in [4, 2147483647]"),
    ({"members": [Member(4, -1)]}, "members[0].row_offset: got -1; must be in [0, 2147483647]"),
    ({"context_parallel": ContextParallel(0, 0)}, "context_parallel.size: got 0; must be in [1, 2147483647]"),
    ({"context_parallel": ContextParallel(2, 2)}, "context_parallel.rank: got 2; must be in [0, 1]"),
    ({"context_parallel": ContextParallel(2, -1)}, "context_parallel.rank: got -1; must be in [0, 1]"),
    ({"context_parallel": ContextParallel(2, 0, 3)}, "context_parallel.interleave: got 3; must divide block_size = 4"),
    ({"context_parallel": ContextParallel(2, 0, 0)}, "context_parallel.interleave: got 0; must divide block_size = 4"),
    (workspace(request_of_row=(0,)), "workspace.request_of_row: got int32 [1] on cpu; must be int32 [2] on cpu"),
    (workspace(starts=((0,),)), "workspace.starts: got int32 [1, 1] on cpu; must be int32 [P] on cpu"),
    (workspace(rank_stride=-1), "workspace.rank_stride: got -1; must be in [0, 2147483647]"),
    ({"out": torch.zeros(2, 2, 5).int()}, "out: got int32 [2, 2, 5] on cpu; must be int32 [2, 2, 4] on cpu"),
    ({"out": torch.zeros(1, 2, 4).int()}, "out: got int32 [1, 2, 4] on cpu; must be int32 [2, 2, 4] on cpu"),
    ({"out": torch.zeros(2, 2, 4)}, "out: got float32 [2, 2, 4] on cpu; must be int32 [2, 2, 4] on cpu"),
    ({"valid_out": torch.zeros(2).int()}, "valid_out: given without a count; set count_valid or compact"),
    ({"valid_out": torch.zeros(3).int(), "compact": True}, "valid_out: got int32 [3] on cpu; must be int32 [2] on cpu"),
    ({"counters": torch.zeros(4).long()}, f"counters: got int64 [4] on cpu; must be int64 [{COLUMNS}] on cpu"),
    ({"counters": torch.zeros(3, 4).long()}, f"counters: got int64 [3, 4] on cpu; must be int64 [S, {COLUMNS}] on cpu"),
    ({"counters": torch.zeros(COLUMNS).int()}, f"counters: got int32 [5] on cpu; must be int64 [{COLUMNS}] on cpu"),
    ({"counters": torch.zeros(0, COLUMNS).long()}, "counters: got 0 stripes; a call adds to at least one"),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        remap(**changes)
    assert str(refusal.value) == f"remap_grouped.{message}"


def test_the_call_they_start_from_is_accepted() -> None:
    assert remap().physical.tolist() == [[[1, 0, 11, -1], [13, 12, 7, -1]], [[5, 4, 23, -1], [29, 28, 15, -1]]]
