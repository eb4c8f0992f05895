"""Structural sets of many rows at once, as tensors: closed-form membership and a bounded list of tokens.

A row's structure consists of ranges: sinks ``[0, sinks)``, local ``[local_start, length)``, and some witness runs of
one common span (blocks for ``uniform`` and ``drift``, single tokens for ``coverage``). So whether a token is structural
takes a few comparisons and a search among the runs, and all structural tokens of a row fit a matrix whose width the
parameters fix. Shapes never depend on values, and nothing here grows with a row's length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.config import Witness
from kvplugin.topology.params import PolicyParams

NO_TOKEN = 2**62
"""Stands for a token that does not exist: above every token, and far enough from 2**63 to add a span to it."""


@dataclass(frozen=True)
class TokenLists:
    """Some tokens of each row: int64 ``[T, M]``, and bool ``[T, M]`` that says which entries count."""

    tokens: Tensor
    mask: Tensor

    @cached_property
    def size(self) -> Tensor:
        """How many count: int64 ``[T, 1]``."""
        return self.mask.sum(1, keepdim=True)

    def where(self, mask: Tensor) -> TokenLists:
        """Those that also satisfy ``mask``, bool ``[T, M]``."""
        return TokenLists(self.tokens, self.mask & mask)

    def first(self, count: Tensor | int) -> TokenLists:
        """The first ``count``, int64 ``[T, 1]``, of each row."""
        return self.where(self.mask.cumsum(1, dtype=torch.int32) <= count)


def join(*lists: TokenLists) -> TokenLists:
    """The lists side by side."""
    return TokenLists(torch.cat([each.tokens for each in lists], 1), torch.cat([each.mask for each in lists], 1))


@dataclass(frozen=True)
class Kinds:
    """Which tokens are structural, by kind: three disjoint bool ``[T, M]``."""

    sink: Tensor
    local: Tensor
    witness: Tensor

    @cached_property
    def any(self) -> Tensor:
        """Which tokens are structural at all."""
        return self.sink | self.local | self.witness


class Structure(NamedTuple):
    """The structural sets of T rows; the set of a row of length 0 is empty.

    Attributes:
        length, sinks, local_start: int64 ``[T, 1]``.
        runs: int64 ``[T, W]``, first tokens of the witness runs, ascending; a run may start beyond the row.
        span: tokens per run. Where a run meets sinks or the local window, those tokens are not witnesses.
    """

    length: Tensor
    sinks: Tensor
    local_start: Tensor
    runs: Tensor
    span: int

    def kinds(self, tokens: Tensor) -> Kinds:
        """Kind of each of ``tokens``, int64 ``[T, M]``; values that are no token of the row get an arbitrary kind."""
        sink = tokens < self.sinks
        local = ~sink & (tokens >= self.local_start) & (tokens < self.length)
        if self.runs.shape[1] == 0:
            return Kinds(sink, local, torch.zeros_like(sink))
        run = torch.searchsorted(self.runs, tokens.contiguous(), right=True) - 1
        start = self.runs.gather(1, run.clamp(min=0))
        inside = (run >= 0) & (tokens - start < self.span) & (tokens < self.length)
        return Kinds(sink, local, inside & ~sink & ~local)

    def enumerate(self, p: PolicyParams) -> TokenLists:
        """All structural tokens, each once; the width depends on ``p`` and the number of runs alone."""
        device, rows = self.length.device, self.length.shape[0]
        sink = torch.arange(p.sink_tokens, device=device).expand(rows, -1)
        local = self.length - 1 - torch.arange(_local_tokens(p), device=device)
        witness = (self.runs.unsqueeze(2) + torch.arange(self.span, device=device)).flatten(1)
        return join(
            TokenLists(sink, sink < self.sinks),
            TokenLists(local, local >= torch.maximum(self.local_start, self.sinks)),
            TokenLists(witness, (witness >= self.sinks) & (witness < self.local_start)),
        )


def structure_of(length: Tensor, p: PolicyParams, block_scores: Tensor | None) -> Structure:
    """Structure of rows of ``length``, int64 ``[T, 1]`` >= 0, without the witnesses of ``coverage``.

    ``block_scores`` are the drift scores, floating ``[T, B]``; ``drift`` without them gives no witnesses.
    """
    end = _ceil_div(length, p.block_size) * p.block_size if p.local_in_blocks else length
    # A window of 0 blocks would begin after the row's end where the last block is not full.
    local_start = torch.minimum((end - _local_tokens(p)).clamp(min=0), length)
    windows = Structure(length, length.clamp(max=p.sink_tokens), local_start, length[:, :0], p.block_size)
    if p.witness is Witness.UNIFORM:
        return windows._replace(runs=_uniform_runs(length, p))
    if p.witness is Witness.DRIFT and block_scores is not None:
        return windows._replace(runs=_drift_runs(windows, p, block_scores))
    return windows


def _local_tokens(p: PolicyParams) -> int:
    """Local window of a long row, in tokens."""
    return p.local * (p.block_size if p.local_in_blocks else 1)


def _ceil_div(length: Tensor, size: int) -> Tensor:
    return (length + size - 1) // size


def _uniform_runs(length: Tensor, p: PolicyParams) -> Tensor:
    step = (_ceil_div(length, p.block_size) // (p.witness_blocks + 1)).clamp(min=1)
    return step * p.block_size * torch.arange(1, p.witness_blocks + 1, device=length.device)


def _drift_runs(windows: Structure, p: PolicyParams, block_scores: Tensor) -> Tensor:
    """The best blocks that touch neither window: walk all blocks from the best on and keep the first free ones."""
    rows, blocks = block_scores.shape
    first = torch.arange(blocks, device=block_scores.device) * p.block_size
    last = torch.minimum(first + p.block_size, windows.length)
    free = (first < windows.length) & (first >= windows.sinks) & (last <= windows.local_start)
    order = torch.sort(-comparable(block_scores), dim=1, stable=True).indices
    free = free.gather(1, order)
    rank = free.cumsum(1)
    slot = torch.where(free & (rank <= p.witness_blocks), rank - 1, p.witness_blocks)
    runs = torch.full((rows, p.witness_blocks + 1), NO_TOKEN, device=first.device)
    runs.scatter_(1, slot, order * p.block_size)
    return runs[:, : p.witness_blocks].sort(1).values


def comparable(scores: Tensor) -> Tensor:
    """Scores whose order is total: NaN becomes -inf and -0.0 becomes 0.0."""
    return torch.where(scores.isnan(), float("-inf"), scores) + 0.0


class Segments(NamedTuple):
    """Coverage segments ``[start, end)`` of each row, int64 ``[T, segments]``; empty ones where L < segments."""

    length: Tensor
    start: Tensor
    end: Tensor

    @classmethod
    def of(cls, length: Tensor, p: PolicyParams) -> Segments:
        """Segments of rows of ``length``, int64 ``[T, 1]``."""
        bounds = torch.arange(p.segments + 1, device=length.device) * length // p.segments
        return cls(length, bounds[:, :-1], bounds[:, 1:])

    @property
    def exist(self) -> Tensor:
        """Which segments hold a token of the row."""
        return self.start < self.end

    def without(self, tokens: TokenLists) -> Tensor:
        """Which of the segments hold a token of the row, but none of ``tokens``."""
        count = self.start.shape[1]
        # Segment of t is the first s with t < floor((s + 1) L / count), that is t + 1 <= (s + 1) L / count.
        segment = ((tokens.tokens + 1) * count - 1) // self.length.clamp(min=1)
        segment = torch.where(tokens.mask, segment.clamp(max=count), count)
        held = torch.zeros(len(segment), count + 1, dtype=torch.bool, device=segment.device)
        return self.exist & ~held.scatter_(1, segment, True)[:, :count]
