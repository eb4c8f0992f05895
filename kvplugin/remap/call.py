"""The remap's arguments: what callers describe, and the one checked call that every implementation receives."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

INT32_MAX = 2**31 - 1
"""Highest physical row that the int32 output can name."""


class Member(NamedTuple):
    """One layer's place in its flat KV pool.

    Attributes:
        stride_rows: rows from the start of one block to the start of the next; more than ``block_size`` where pages of
            other layers lie between them.
        row_offset: row at which block 0 starts.
    """

    stride_rows: int
    row_offset: int = 0


class ContextParallel(NamedTuple):
    """How the tokens of a request are dealt out to ranks: ``interleave`` neighbours to each rank in turn.

    Rank ``(token // interleave) % size`` holds a token; ``block_size`` is a multiple of ``interleave``.
    """

    size: int
    rank: int
    interleave: int = 1


NO_CONTEXT_PARALLEL = ContextParallel(size=1, rank=0)


class PrefillWorkspace(NamedTuple):
    """Where prefill rows find their tokens: in gathered copies of whole requests instead of the paged pool.

    Attributes:
        request_of_row: int32 ``[T]``, prefill request of each row; negative = decode row, which reads the pool.
        starts: int32 ``[P]``, first workspace row of each prefill request.
        rank_stride: workspace rows per context-parallel rank; the ranks' shards lie one after another.
    """

    request_of_row: Tensor
    starts: Tensor
    rank_stride: int = 0


class RemapCall(NamedTuple):
    """Arguments of one ``remap_into`` call. Values are *not* trusted; shapes, dtypes, devices and plain numbers are.

    T, K and G are at least 1.

    Attributes:
        topk: int32 or int64 ``[T, K]``; any strides.
        request_of_row: int32 or int64 ``[T]``; any stride.
        block_table: int32 or int64 ``[R, M]``; any strides; R and M may be 0.
        members: int64 ``[G, 2]``, contiguous: ``stride_rows`` and ``row_offset`` of each member, trusted.
        block_size: tokens per block.
        num_blocks: blocks in the pool.
        compact: move valid rows to the front, in slot order.
        context_parallel: :data:`NO_CONTEXT_PARALLEL` where there is one rank.
        workspace: None where all rows read the paged pool.
        physical: int32 ``[G, T, K]``, written in full; any strides.
        valid: int32 ``[T]``, written in full, or None; never None with ``compact``.
        counters: int64 ``[S, len(RemapCounter)]``, added to, or None.
    """

    topk: Tensor
    request_of_row: Tensor
    block_table: Tensor
    members: Tensor
    block_size: int
    num_blocks: int
    compact: bool
    context_parallel: ContextParallel
    workspace: PrefillWorkspace | None
    physical: Tensor
    valid: Tensor | None
    counters: Tensor | None
