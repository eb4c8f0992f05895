"""What both sides translate: rows with holes, tokens beyond the table, and every option of vLLM's conversion."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from kvplugin.remap import ContextParallel, PrefillWorkspace
from kvplugin.remap.call import NO_CONTEXT_PARALLEL

WIDTHS = (128, 2048, 2176)
BLOCK_SIZE = 64
PACKED_STRIDE = 3 * BLOCK_SIZE
"""Rows from block to block where the pages of two other layers lie between."""

ROWS, REQUESTS, PREFILLS, COLUMNS, BLOCKS = 5, 3, 2, 40, 500
_RANK_STRIDE = 5000
_HOLES, _BEYOND = 0.2, 0.05
"""Shares of unused slots, and of tokens past the last column of the table."""


@dataclass(frozen=True)
class ParityCase:
    """One conversion. Table entries and request ids are valid: vLLM's kernel checks neither.

    Attributes:
        width: slots per row.
        stride_rows: physical rows from block to block.
        context_parallel: this rank among those that share a request.
        rank_stride: workspace rows per rank; None = no row reads a workspace.
        count_valid, compact: as in ``remap_grouped``.
        seed: of the values.
    """

    width: int
    stride_rows: int = BLOCK_SIZE
    context_parallel: ContextParallel = NO_CONTEXT_PARALLEL
    rank_stride: int | None = None
    count_valid: bool = False
    compact: bool = False
    seed: int = 0

    def __str__(self) -> str:
        size, rank, interleave = self.context_parallel
        parts = [f"K{self.width}", f"stride{self.stride_rows}"]
        parts += [f"rank{rank}of{size}by{interleave}"] * (size > 1)
        parts += [f"workspace{self.rank_stride}"] * (self.rank_stride is not None)
        parts += ["count"] * self.count_valid + ["compact"] * self.compact
        return "-".join((*parts, f"seed{self.seed}"))

    @cached_property
    def topk(self) -> Tensor:
        """int32 ``[ROWS, width]``: distinct tokens in no order; the first row is full, the last one empty."""
        visible = COLUMNS * BLOCK_SIZE * self.context_parallel.size
        generator = self._generator()
        tokens = torch.rand(ROWS, visible, generator=generator).argsort()[:, : self.width].to(torch.int32)
        fate = torch.rand(ROWS, self.width, generator=generator)
        fate[0] = 1.0
        tokens[fate < _HOLES + _BEYOND] += visible
        tokens[fate < _HOLES] = -1
        tokens[1, self.width // 2 :] = -1
        tokens[-1] = -1
        return tokens

    @cached_property
    def request_of_row(self) -> Tensor:
        """int32 ``[ROWS]``."""
        return torch.randint(REQUESTS, (ROWS,), generator=self._generator(), dtype=torch.int32)

    @cached_property
    def block_table(self) -> Tensor:
        """int32 ``[REQUESTS, COLUMNS]``: no page twice."""
        pages = torch.randperm(BLOCKS, generator=self._generator())
        return pages[: REQUESTS * COLUMNS].reshape(REQUESTS, COLUMNS).to(torch.int32)

    @cached_property
    def workspace(self) -> PrefillWorkspace | None:
        """Decode rows and rows of every prefill request, or None."""
        if self.rank_stride is None:
            return None
        requests = torch.tensor([-1, *range(PREFILLS), -1, 0], dtype=torch.int32)
        starts = torch.randint(1000, (PREFILLS,), generator=self._generator(), dtype=torch.int32)
        return PrefillWorkspace(requests, starts, self.rank_stride)

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def parity_cases() -> Iterator[ParityCase]:
    """Every option, each with a seed and (under context parallelism) a rank of its own.

    The narrow width meets every combination. The wide ones, slow in the interpreter, meet every way of dealing tokens,
    and the ways of counting by turns.
    """
    numbered = enumerate([*_one_rank(), *_context_parallel(), *_workspaces()])
    for number, (width, stride, (size, interleave), rank_stride, count, compact) in numbered:
        context_parallel = ContextParallel(size, number % size, interleave)
        yield ParityCase(width, stride, context_parallel, rank_stride, count, compact, seed=number)


_Options = tuple[int, int, tuple[int, int], int | None, bool, bool]
_STRIDES = (BLOCK_SIZE, PACKED_STRIDE)
_DEALT = tuple(product((2, 4), (1, 16)))
_PLAIN, _COMPACT, _COUNT, _COMPACT_UNCOUNTED = (False, False), (True, True), (True, False), (False, True)


def _one_rank() -> Iterator[_Options]:
    for width, stride, counting in product(WIDTHS, _STRIDES, (_PLAIN, _COMPACT)):
        yield width, stride, (1, 1), None, *counting


def _context_parallel() -> Iterator[_Options]:
    """vLLM's filter also counts without compacting, and compacts without telling the count."""
    countings = (_PLAIN, _COMPACT, _COUNT, _COMPACT_UNCOUNTED)
    for number, (width, dealt, counting) in enumerate(_combined(_DEALT, countings)):
        yield width, _STRIDES[number % 2], dealt, None, *counting


def _workspaces() -> Iterator[_Options]:
    for width, dealt, counting in _combined(((1, 1), *_DEALT), (_PLAIN, _COMPACT)):
        yield width, BLOCK_SIZE, dealt, 0 if dealt == (1, 1) else _RANK_STRIDE, *counting


def _combined(
    dealt: Sequence[tuple[int, int]], countings: Sequence[tuple[bool, bool]]
) -> Iterator[tuple[int, tuple[int, int], tuple[bool, bool]]]:
    narrow, *wide = WIDTHS
    yield from product((narrow,), dealt, countings)
    for number, (width, deal) in enumerate(product(wide, dealt)):
        yield width, deal, countings[number % len(countings)]
