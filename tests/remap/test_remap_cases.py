"""Small remaps with results worked out by hand, shapes that others found awkward, and numbers near the limits."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch
from policy_cases import Layout
from remap_cases import Case, every_implementation, run

from kvplugin.remap import ContextParallel, Member, PrefillWorkspace, RemapCounter
from kvplugin.remap.call import INT32_MAX

PLAIN = Member(4)
SHIFTED = Member(12, 4)
INT32_MIN = -(2**31)


class Named(NamedTuple):
    """Requests of each row, their tokens, what these become for each member, and the counters that say why."""

    name: str
    tokens: list[list[int]]
    physical: list[list[list[int]]]
    counts: dict[RemapCounter, int] = {}  # noqa: RUF012 - read only
    changes: dict[str, Any] = {}  # noqa: RUF012 - read only


def workspace(*requests: int, starts: list[int], rank_stride: int = 0) -> dict[str, PrefillWorkspace]:
    tensors = (torch.tensor(values, dtype=torch.int32) for values in (requests, starts))
    return {"workspace": PrefillWorkspace(*tensors, rank_stride)}


REQUEST, BLOCK, PAGE = RemapCounter.INVALID_REQUEST, RemapCounter.INVALID_BLOCK, RemapCounter.INVALID_PAGE
TOKEN, OVERFLOW = RemapCounter.INVALID_TOKEN, RemapCounter.OVERFLOW

# Blocks of 4 tokens in a pool of 10. Request 0 holds pages 7, 2, 5; request 1 holds page 9 and nothing else.
NAMED = [
    Named("pages in any order", [[0, 5, 11, 8]], [[[28, 9, 23, 20]]]),
    Named("unused slots", [[-1, 5, -1, -1]], [[[-1, 9, -1, -1]]]),
    Named("two members", [[0, 5, -1, 8]], [[[28, 9, -1, 20]], [[88, 29, -1, 64]]], {}, {"members": (PLAIN, SHIFTED)}),
    Named("the second request", [[0, 3, -1, -1]], [[[36, 39, -1, -1]]], {}, {"request_of_row": torch.tensor([1])}),
    Named("wild tokens", [[2143289344, INT32_MAX, INT32_MIN, -2]], [[[-1] * 4]], {TOKEN: 2, BLOCK: 2}),
    Named("beyond the table", [[12, 11, 0, -1]], [[[-1, 23, 28, -1]]], {BLOCK: 1}),
    Named("table padding", [[3, 4, 8, -1]], [[[39, -1, -1, -1]]], {PAGE: 2}, {"request_of_row": torch.tensor([1])}),
    Named("page 7 is no block", [[0, 5, 11, -1]], [[[-1, 9, 23, -1]]], {PAGE: 1}, {"num_blocks": 7}),
    Named("an empty pool", [[0, 5, 11, -1]], [[[-1] * 4]], {PAGE: 3}, {"num_blocks": 0}),
    Named("request 2", [[0, -1, -2, 5]], [[[-1] * 4]], {REQUEST: 2, TOKEN: 1}, {"request_of_row": torch.tensor([2])}),
    Named("request -1", [[0, -1, 99, 5]], [[[-1] * 4]], {REQUEST: 3}, {"request_of_row": torch.tensor([-1])}),
    Named("a padded row stays empty", [[-1] * 4], [[[-1] * 4]], {}, {"request_of_row": torch.tensor([INT32_MAX])}),
    Named("no requests", [[0, 1, -1, 2]], [[[-1] * 4]], {REQUEST: 3}, {"block_table": torch.zeros(0, 3).int()}),
    Named("no blocks", [[0, 1, -1, 2]], [[[-1] * 4]], {BLOCK: 3}, {"block_table": torch.zeros(2, 0).int()}),
    Named(
        "rows of all kinds",
        [[0, 5, 11, 8], [0, 0, 4, -1], [1, 2, 3, -1]],
        [[[28, 9, 23, 20], [36, 36, -1, -1], [-1] * 4]],
        {PAGE: 1, REQUEST: 3},
        {"request_of_row": torch.tensor([0, 1, 5])},
    ),
    Named("compaction", [[-1, 5, 99, 8]], [[[9, 20, -1, -1]]], {BLOCK: 1}, {"compact": True}),
    Named("compaction of nothing", [[-1, -1, 99, -2]], [[[-1] * 4]], {BLOCK: 1, TOKEN: 1}, {"compact": True}),
    Named(
        "rank 1 of 2: every other token",
        [[0, 1, 5, 9]],
        [[[-1, 28, 30, 8]]],
        {},
        {"context_parallel": ContextParallel(2, 1)},
    ),
    Named(
        "rank 0 of 2 by twos, compacted",
        [[0, 2, 5, 9]],
        [[[28, 31, 9, -1]]],
        {},
        {"context_parallel": ContextParallel(2, 0, 2), "compact": True},
    ),
    Named(
        "a foreign token is nobody's fault here",
        [[1, 99, -2, -1]],
        [[[-1] * 4]],
        {TOKEN: 1},
        {"context_parallel": ContextParallel(2, 0), "request_of_row": torch.tensor([7])},
    ),
    Named("workspace", [[0, 5, 11, -1]], [[[100, 105, 111, -1]]], {}, workspace(1, starts=[50, 100])),
    Named(
        "a workspace is the same for all members, and needs neither request nor pages",
        [[0, 5, 11, 12]],
        [[[50, 55, 61, -1]], [[50, 55, 61, -1]]],
        {BLOCK: 1},
        {"members": (PLAIN, SHIFTED), "request_of_row": torch.tensor([-1]), "num_blocks": 0}
        | workspace(0, starts=[50]),
    ),
    Named("a decode row beside it", [[0, 5, -1, 8]], [[[28, 9, -1, 20]]], {}, workspace(-1, starts=[50])),
    Named("no such workspace", [[0, 5, -1, -2]], [[[-1] * 4]], {REQUEST: 2, TOKEN: 1}, workspace(1, starts=[50])),
    Named("no workspace at all", [[0, 5, -1, 8]], [[[-1] * 4]], {REQUEST: 3}, workspace(0, starts=[])),
    Named(
        "a gathered workspace: the ranks' shards one after another",
        [[0, 1, 4, 5]],
        [[[50, 1050, 52, 1052]]],
        {},
        {"context_parallel": ContextParallel(2, 1)} | workspace(0, starts=[50], rank_stride=1000),
    ),
    Named("a workspace at row -5", [[0, 4, 5, -1]], [[[-1, -1, 0, -1]]], {OVERFLOW: 2}, workspace(0, starts=[-5])),
    Named(
        "a workspace beyond int32",
        [[0, 5, 11, -1]],
        [[[INT32_MAX - 5, INT32_MAX, -1, -1]]],
        {OVERFLOW: 1},
        workspace(0, starts=[INT32_MAX - 5]),
    ),
    Named(
        "a member beyond int32 takes the slot from all",
        [[0, 4, 7, 8]],
        [[[-1, 8, -1, -1]], [[-1, INT32_MAX - 1, -1, -1]]],
        {OVERFLOW: 3},
        {"members": (PLAIN, Member(4, INT32_MAX - 9))},
    ),
]  # fmt: skip


@every_implementation
@pytest.mark.parametrize("named", NAMED, ids=[named.name for named in NAMED])
@pytest.mark.parametrize("layout", [Layout.PLAIN, Layout.TRANSPOSED])
def test_named(implementation: ModuleType, named: Named, layout: Layout) -> None:
    case = Case(
        topk=torch.tensor(named.tokens, dtype=torch.int32),
        request_of_row=torch.zeros(len(named.tokens), dtype=torch.int32),
        block_table=torch.tensor([[7, 2, 5], [9, -1, -1]], dtype=torch.int32),
        members=(PLAIN,),
        block_size=4,
        num_blocks=10,
        layout=layout,
    )
    outcome = run(implementation, replace(case, **named.changes))
    assert outcome.physical.tolist() == named.physical
    assert outcome.counted() == named.counts
    assert outcome.valid is not None
    assert outcome.valid.tolist() == [sum(slot >= 0 for slot in row) for row in named.physical[0]]


@every_implementation
def test_a_row_counts_in_its_stripe(implementation: ModuleType) -> None:
    case = Case(
        topk=torch.tensor([[-2, 0, 0], [-2, -2, 0], [-2, -2, -2], [99, -1, 0]], dtype=torch.int32),
        request_of_row=torch.zeros(4, dtype=torch.int32),
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        members=(Member(64),),
        stripes=3,
    )
    counters = run(implementation, case).counters
    assert counters is not None
    assert counters[:, [TOKEN, BLOCK]].tolist() == [[1, 1], [2, 0], [3, 0]]


SHAPES = [  # rows, requests, blocks, width, block size, stride, layer
    (4, 2, 128, 64, 64, 64, 0),
    (4, 2, 128, 64, 64, 192, 1),
    (1, 1, 128, 64, 64, 64, 0),
    (32, 8, 256, 64, 64, 64, 0),
    (8, 4, 128, 16, 16, 16, 0),
    (4, 2, 128, 64, 64, 64, 2),
    (4, 2, 2048, 64, 64, 192, 1),
    *((2, 2, 40, width, 64, 128, 1) for width in (1, 255, 256, 257, 2048, 2176)),
]


def healthy(rows: int, requests: int, blocks: int, width: int, block_size: int, stride: int, layer: int) -> Case:
    """Random tokens and pages, all of them in range."""
    random = torch.Generator().manual_seed(0)
    return Case(
        topk=torch.randint(blocks * block_size, (rows, width), generator=random, dtype=torch.int32),
        request_of_row=torch.randint(requests, (rows,), generator=random, dtype=torch.int32),
        block_table=torch.randint(4096, (requests, blocks), generator=random, dtype=torch.int32),
        members=(Member(stride, layer * block_size),),
        block_size=block_size,
        num_blocks=4096,
    )


@every_implementation
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes(implementation: ModuleType, shape: tuple[int, int, int, int, int, int, int]) -> None:
    case = healthy(*shape)
    (member,), tokens = case.members, case.topk.long()
    pages = case.block_table[case.request_of_row.long()].gather(1, tokens // case.block_size)
    expected = pages * member.stride_rows + member.row_offset + tokens % case.block_size
    outcome = run(implementation, case)
    assert torch.equal(outcome.physical[0], expected.int())
    assert outcome.counted() == {}


@every_implementation
@pytest.mark.parametrize("compact", [False, True])
def test_nothing_valid(implementation: ModuleType, compact: bool) -> None:
    case = replace(healthy(4, 2, 128, 64, 64, 192, 1), compact=compact)
    unused = run(implementation, replace(case, topk=torch.full_like(case.topk, -1)))
    padding = run(implementation, replace(case, block_table=torch.full_like(case.block_table, -1)))
    for outcome in (unused, padding):
        assert bool((outcome.physical == -1).all())
        assert outcome.valid is not None
        assert not outcome.valid.any()
    assert (unused.counted(), padding.counted()) == ({}, {PAGE: 4 * 64})


LIMITS = [  # stride, offset, page, position: the row, or None where it leaves int32
    (2**26, 0, 31, 63, 31 * 2**26 + 63),
    (2**26, 2**26 - 64, 31, 63, INT32_MAX),
    (2**26, 2**26 - 63, 31, 63, None),
    (2**26, 0, 32, 0, None),
    (2**26, 0, 63, 0, None),
    (2**26, 0, 64, 0, None),  # 2**32: cut to 32 bits, row 0 of another layer
    (2**26, 5, 2**20, 0, None),
    (INT32_MAX, 0, 1, 0, INT32_MAX),
    (INT32_MAX, 0, 1, 1, None),
    (INT32_MAX, INT32_MAX, INT32_MAX - 1, 63, None),
    (64, INT32_MAX, 0, 0, INT32_MAX),
    (64, 0, 2**25 - 1, 63, INT32_MAX),
    (64, 0, 2**25, 0, None),
]


@every_implementation
@pytest.mark.parametrize(("stride", "offset", "page", "position", "row"), LIMITS)
@pytest.mark.parametrize("neighbour", [Member(64), Member(2**26)], ids=["near", "far"])
def test_rows_near_the_end_of_int32(
    implementation: ModuleType, stride: int, offset: int, page: int, position: int, row: int | None, neighbour: Member
) -> None:
    case = Case(
        topk=torch.tensor([[position, -1]], dtype=torch.int64),
        request_of_row=torch.tensor([0]),
        block_table=torch.tensor([[page]], dtype=torch.int32),
        members=(Member(stride, offset), neighbour),
        num_blocks=INT32_MAX,
    )
    outcome = run(implementation, case)
    if page * neighbour.stride_rows + position > INT32_MAX:
        row = None
    assert outcome.physical[0].tolist() == [[-1 if row is None else row, -1]]
    assert outcome.counted() == ({OVERFLOW: 1} if row is None else {})


@every_implementation
def test_a_table_of_int64_is_not_cut_short(implementation: ModuleType) -> None:
    case = Case(
        topk=torch.arange(4, dtype=torch.int32).unsqueeze(0) * 64,
        request_of_row=torch.tensor([0]),
        block_table=torch.tensor([[3, 2**32 + 3, -(2**63), 2**63 - 1]]),
        members=(Member(64),),
    )
    outcome = run(implementation, case)
    assert outcome.physical.tolist() == [[[192, -1, -1, -1]]]
    assert outcome.counted() == {PAGE: 3}
