"""The remap on the CPU: one pass per row, each table entry read once for all members, rows on several threads."""

from __future__ import annotations

from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvplugin.remap.call import ContextParallel, RemapCall
from kvplugin.remap.counters import RemapCounter
from kvplugin.remap.numba_rows import Cube, Plan, RemapBatch, remap_rows
from kvplugin.topology.numba_args import matrix, record_dtype
from kvplugin.topology.numba_threads import CREW, thread_count

_NO_ROWS, _NO_COUNTERS = np.empty(0, np.int32), np.empty((0, len(RemapCounter)), np.int64)
_PLAN = record_dtype(Plan)


def remap_into(call: RemapCall) -> None:
    """Fill ``physical`` and ``valid``, add to ``counters``; see :func:`kvplugin.remap.op.remap_grouped`."""
    batch = batch_of(call)
    CREW.run([partial(remap_rows, tuple(batch))] * thread_count(*call.topk.shape))
    hand_over(call, batch)


def batch_of(call: RemapCall) -> RemapBatch:
    """The call as kernels receive it."""
    (rows, width), workspace = call.topk.shape, call.workspace
    plan = _plan(
        width,
        tuple(call.block_table.shape),
        call.block_size,
        call.num_blocks,
        call.context_parallel,
        0 if workspace is None else workspace.rank_stride,
        call.compact,
        workspace is not None,
    )
    return RemapBatch(
        np.zeros(1, np.int64),
        plan,
        matrix(call.topk),
        np.ascontiguousarray(call.request_of_row.numpy(), np.int64),
        matrix(call.block_table),
        call.members.numpy(),
        _NO_ROWS if workspace is None else np.ascontiguousarray(workspace.request_of_row.numpy()),
        _NO_ROWS if workspace is None else np.ascontiguousarray(workspace.starts.numpy()),
        _cube(call.physical),
        np.empty(rows, np.int32),
        _NO_COUNTERS if call.counters is None else np.zeros(call.counters.shape, np.int64),
    )


def hand_over(call: RemapCall, batch: RemapBatch) -> None:
    """Fill ``call.valid`` and add to ``call.counters`` what the kernels left in the batch."""
    if call.valid is not None:
        call.valid.numpy()[...] = batch.valid
    if call.counters is not None and batch.counts.any():
        call.counters.numpy()[...] += batch.counts


@lru_cache(maxsize=256)
def _plan(
    width: int,
    table_shape: tuple[int, int],
    block_size: int,
    num_blocks: int,
    context_parallel: ContextParallel,
    rank_stride: int,
    compact: bool,
    has_workspace: bool,
) -> NDArray[np.void]:
    plain = block_size & (block_size - 1) == 0 and context_parallel.size == 1
    shift = block_size.bit_length() - 1 if plain else -1
    plan = Plan(
        width, *table_shape, block_size, shift, num_blocks, *context_parallel, rank_stride, compact, has_workspace
    )
    return np.array([plan], _PLAN)


def _cube(tensor: Tensor) -> Cube:
    (members, rows, slots), (member_stride, row_stride, slot_stride) = tensor.shape, tensor.stride()
    span = 1 + (members - 1) * member_stride + (rows - 1) * row_stride + (slots - 1) * slot_stride
    return Cube(tensor.as_strided((span,), (1,)).numpy(), member_stride, row_stride, slot_stride)
