"""Hypothesis strategies for remap calls: Hypothesis draws the kinds, a seeded generator the numbers.

Most rows and slots of a case are healthy: a fault hides what comes after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import torch
from hypothesis import strategies as st
from policy_cases import Layout
from remap_cases import Case
from torch import Tensor

from kvplugin.remap import ContextParallel, Member, PrefillWorkspace
from kvplugin.remap.call import INT32_MAX, NO_CONTEXT_PARALLEL

INT32_MIN = -(2**31)
WIDTHS = (7, 7, 7, 1, 127, 128, 129, 255, 256, 257, 2176)
INDEX_DTYPES = (torch.int32, torch.int64)
TOKEN_HAZARDS = (-2, INT32_MIN, 2143289344, INT32_MAX)
LONG_HAZARDS = (2**32, 2**32 + 1, -(2**63), 2**63 - 1)
"""Cut to 32 bits, the first two would be tokens 0 and 1."""


@st.composite
def topk_rows(draw: st.DrawFn, rows: int, width: int, visible: int, clean: bool) -> Tensor:
    """Learned rows: tokens of the table, unused slots, some tokens beyond the table, and hazards."""
    random, dtype = _random(draw, "topk"), draw(st.sampled_from(INDEX_DTYPES))
    unused = random.choice((0.0, 0.1, 0.5))
    beyond = 0 if clean else random.choice((0, 3))
    tokens = [
        [-1 if random.random() < unused else random.randrange(visible + beyond) for _ in range(width)]
        if visible + beyond
        else [-1] * width
        for _ in range(rows)
    ]
    hazards = (*TOKEN_HAZARDS, *(LONG_HAZARDS if dtype is torch.int64 else ()))
    for _ in range(0 if clean else random.choice((0, 0, 4))):
        tokens[random.randrange(rows)][random.randrange(width)] = random.choice(hazards)
    return torch.tensor(tokens, dtype=dtype)


@st.composite
def block_tables(draw: st.DrawFn, requests: int, blocks: int, num_blocks: int, clean: bool) -> Tensor:
    """A table of healthy pages; unless clean, perhaps with padding and wild entries."""
    random = _random(draw, "table")
    wild = 0.0 if clean else random.choice((0.0, 0.0, 0.3))
    entries = (-1, num_blocks, INT32_MAX, INT32_MIN)
    table = [
        [random.choice(entries) if random.random() < wild else random.randrange(num_blocks) for _ in range(blocks)]
        for _ in range(requests)
    ]
    return torch.tensor(table, dtype=draw(st.sampled_from(INDEX_DTYPES))).reshape(requests, blocks)


@st.composite
def groups(draw: st.DrawFn, block_size: int, clean: bool) -> tuple[Member, ...]:
    """Members side by side in one pool, with unequal strides, or so far out that rows leave int32."""
    count = draw(st.sampled_from((1, 2, 4)))
    kind = draw(st.sampled_from(("packed", "unequal") if clean else ("packed", "unequal", "far")))
    if kind == "packed":
        return tuple(Member(count * block_size, layer * block_size) for layer in range(count))
    if kind == "unequal":
        return tuple(Member((layer + 1) * block_size + layer, 5 * layer) for layer in range(count))
    return tuple(Member(2**26, (INT32_MAX - 2**27) * (layer % 2)) for layer in range(count))


def _random(draw: st.DrawFn, what: str) -> Random:
    """Numbers for one part of a case; Hypothesis likes to draw the same seed, so parts would go together."""
    return Random(f"{what} {draw(st.integers(0, 2**32))}")


def _per_row(random: Random, rows: int, healthy: Sequence[int], wild: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A value for each row, one in six of them wild where there are any."""
    values = [
        random.choice(wild if not healthy or (wild and random.random() < 1 / 6) else healthy) for _ in range(rows)
    ]
    return torch.tensor(values, dtype=dtype)


def _workspace(random: Random, rows: int, clean: bool) -> PrefillWorkspace:
    prefills = random.choice((1, 3) if clean else (1, 3, 3, 3, 3, 0))
    return PrefillWorkspace(
        _per_row(random, rows, (-1, *range(prefills)), () if clean else (prefills, INT32_MAX, INT32_MIN), torch.int32),
        _per_row(random, prefills, (0, 1000), () if clean else (INT32_MAX - 50, -20), torch.int32),
        random.choice((0, 5000) if clean else (0, 5000, 2**30)),
    )


@st.composite
def cases(draw: st.DrawFn, *, clean: bool = False, workspaces: bool = True, widths: Sequence[int] = WIDTHS) -> Case:
    """A whole call. ``clean`` ones hold unused slots but no fault, ``workspaces`` may bring prefill rows."""
    random = _random(draw, "case")
    rows, width = draw(st.sampled_from((3, 1))), draw(st.sampled_from(widths))
    requests, blocks = random.choice(((2, 9), (1, 1), (3, 2)) * 6 + (() if clean else ((0, 2), (2, 0))))
    block_size, num_blocks = random.choice((64, 16, 1, 48)), random.choice((40, 40, 1))
    context_parallel = NO_CONTEXT_PARALLEL
    if draw(st.booleans()):
        size = random.randint(1, 4)
        interleave = random.choice([i for i in (1, 16) if block_size % i == 0])
        context_parallel = ContextParallel(size, random.randrange(size), interleave)
    wild_ids = () if clean else (-1, requests, INT32_MAX, INT32_MIN)
    return Case(
        topk=draw(topk_rows(rows, width, blocks * block_size * context_parallel.size, clean)),
        request_of_row=_per_row(random, rows, range(requests), wild_ids, random.choice(INDEX_DTYPES)),
        block_table=draw(block_tables(requests, blocks, num_blocks, clean)),
        members=draw(groups(block_size, clean)),
        block_size=block_size,
        num_blocks=num_blocks,
        compact=draw(st.booleans()),
        counting=draw(st.booleans()),
        context_parallel=context_parallel,
        workspace=_workspace(random, rows, clean) if workspaces and draw(st.booleans()) else None,
        stripes=draw(st.sampled_from((2, 1, None))),
        layout=draw(st.sampled_from(Layout)),
    )
