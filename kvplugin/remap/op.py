"""The remap's public function: argument checks, the registered operator, and the choice of implementation by device."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvplugin.errors import ArgumentError
from kvplugin.forms import form_for
from kvplugin.remap.call import (
    INT32_MAX,
    NO_CONTEXT_PARALLEL,
    ContextParallel,
    Member,
    PrefillWorkspace,
    RemapCall,
)
from kvplugin.remap.counters import RemapCounter
from kvplugin.tensor_checks import check_tensor

INDEX_DTYPES = (torch.int32, torch.int64)
COLUMNS = len(RemapCounter)


class Remapped(NamedTuple):
    """What :func:`remap_grouped` returns.

    Attributes:
        physical: int32 ``[G, T, K]``, rows of each member's flat KV pool; -1 = no row.
        valid: int32 ``[T]``, slots with a row, the same for all members; None where nobody asked for it.
    """

    physical: Tensor
    valid: Tensor | None


@cache
def implementation_for(device_type: str) -> ModuleType:
    """The module that serves a device: Triton on GPUs, numba on the CPU, vectorised torch where these are missing."""
    return form_for(device_type, "kvplugin.remap", "torch_ops", "the remap runs in its slower torch form")


def remap_grouped(
    topk: Tensor,
    request_of_row: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_blocks: int,
    members: Sequence[Member],
    count_valid: bool = False,
    compact: bool = False,
    context_parallel: ContextParallel | None = None,
    workspace: PrefillWorkspace | None = None,
    out: Tensor | None = None,
    valid_out: Tensor | None = None,
    counters: Tensor | None = None,
) -> Remapped:
    """Translate the learned top-k of a batch into physical KV rows, for all layers that share it, in one launch.

    Member g finds token ``tok`` of request r at ``page * stride_rows[g] + row_offset[g] + tok % block_size`` with
    ``page = block_table[r, tok // block_size]``. A slot is -1 where it is unused, or where any step leads outside what
    exists; a row that does not fit int32 for one member makes the slot -1 for *all* of them, so that one valid count
    and one order hold for the group. With one member this is vLLM's own conversion, wherever that one is defined.

    No host synchronisation; works inside a captured CUDA graph, whose first call (outside the capture) places the
    members on the device. A prefill row of ``workspace`` reads neither ``request_of_row`` nor the table, yet its tokens
    are bounded by the table's width all the same.

    Args:
        topk: int32 or int64 ``[T, K]``, token positions inside the row's request, any strides; -1 = unused slot.
        request_of_row: int32 or int64 ``[T]``, row of the block table; rows outside it become all -1.
        block_table: int32 or int64 ``[R, M]``, any strides.
        block_size: tokens per block of the table (on one context-parallel rank).
        num_blocks: blocks in the pool; table entries outside ``[0, num_blocks)`` give -1.
        members: place of each layer; ``stride_rows >= block_size``.
        count_valid: also return how many slots of each row are valid.
        compact: move the valid slots of each row to the front, in their order, -1 behind them; implies ``count_valid``.
        context_parallel: translate only the tokens this rank holds; the others are -1.
        workspace: rows that read a gathered workspace instead of the paged pool; the same row for all members.
        out: int32 ``[G, T, K]`` to write to, any strides, no overlap with the inputs; default a new tensor.
        valid_out: int32 ``[T]`` to write to; needs ``count_valid`` or ``compact``.
        counters: int64 ``[len(RemapCounter)]`` or ``[S, len(RemapCounter)]`` to add to (row t to stripe ``t % S``).

    Raises:
        ArgumentError: a wrong shape, dtype, device or number.
    """
    call = checked_call(
        "remap_grouped",
        topk,
        request_of_row,
        block_table,
        block_size=block_size,
        num_blocks=num_blocks,
        members=members,
        count_valid=count_valid,
        compact=compact,
        context_parallel=context_parallel,
        workspace=workspace,
        out=out,
        valid_out=valid_out,
        counters=counters,
    )
    torch.ops.kvplugin.remap_grouped(*operator_arguments(call))
    return Remapped(call.physical, call.valid)


def checked_call(
    where: str,
    topk: Tensor,
    request_of_row: Tensor,
    block_table: Tensor,
    *,
    block_size: int,
    num_blocks: int,
    members: Sequence[Member],
    count_valid: bool = False,
    compact: bool = False,
    context_parallel: ContextParallel | None = None,
    workspace: PrefillWorkspace | None = None,
    out: Tensor | None = None,
    valid_out: Tensor | None = None,
    counters: Tensor | None = None,
    counters_name: str = "counters",
) -> RemapCall:
    """The arguments of :func:`remap_grouped`, with the outputs it was not given and counters of either shape.

    Raises:
        ArgumentError: as there, under the name ``where``.
    """
    device = topk.device
    check_tensor(where, "topk", topk, ("T", "K"), INDEX_DTYPES, device)
    rows, width = topk.shape
    check_tensor(where, "request_of_row", request_of_row, (rows,), INDEX_DTYPES, device)
    check_tensor(where, "block_table", block_table, ("R", "M"), INDEX_DTYPES, device)
    _check_number(where, "block_size", block_size, 1)
    _check_number(where, "num_blocks", num_blocks, 0)
    members = tuple(members)
    for g, member in enumerate(members):
        _check_number(where, f"members[{g}].stride_rows", member.stride_rows, block_size)
        _check_number(where, f"members[{g}].row_offset", member.row_offset, 0)
    # A fake tensor's table is fake as well, and must not be kept.
    placed = (place_members if type(topk) is Tensor else _member_table)(members, device)
    if context_parallel is None:
        context_parallel = NO_CONTEXT_PARALLEL
    else:
        _check_context_parallel(where, context_parallel, block_size)
    if workspace is not None:
        check_tensor(where, "workspace.request_of_row", workspace.request_of_row, (rows,), (torch.int32,), device)
        check_tensor(where, "workspace.starts", workspace.starts, ("P",), (torch.int32,), device)
        _check_number(where, "workspace.rank_stride", workspace.rank_stride, 0)
    if out is None:
        out = torch.empty(len(placed), rows, width, dtype=torch.int32, device=device)
    else:
        check_tensor(where, "out", out, (len(placed), rows, width), (torch.int32,), device)
    if valid_out is not None:
        if not (count_valid or compact):
            raise ArgumentError(f"{where}.valid_out", "given without a count", "set count_valid or compact")
        check_tensor(where, "valid_out", valid_out, (rows,), (torch.int32,), device)
    elif count_valid or compact:
        valid_out = torch.empty(rows, dtype=torch.int32, device=device)
    if counters is not None:
        shape = (COLUMNS,) if counters.dim() == 1 else ("S", COLUMNS)
        check_tensor(where, counters_name, counters, shape, (torch.int64,), device)
        if counters.shape[0] == 0:
            raise ArgumentError(f"{where}.{counters_name}", "got 0 stripes", "a call adds to at least one")
    return RemapCall(
        topk,
        request_of_row,
        block_table,
        placed,
        block_size,
        num_blocks,
        compact,
        context_parallel,
        workspace,
        out,
        valid_out,
        counters,
    )


def operator_arguments(call: RemapCall) -> tuple[Any, ...]:
    """The call as the operator takes it, which knows no structures."""
    pool = (call.topk, call.request_of_row, call.block_table, call.members, call.block_size, call.num_blocks)
    workspace = (None, None, 0) if call.workspace is None else call.workspace
    return (*pool, call.compact, *call.context_parallel, *workspace, call.physical, call.valid, call.counters)


def _member_table(members: tuple[Member, ...], device: torch.device) -> Tensor:
    return torch.tensor(members, dtype=torch.int64, device=device).reshape(len(members), 2)


_PLACED = cache(_member_table)
"""Owner of the member tensors. None is ever dropped: captured CUDA graphs hold their addresses."""


def place_members(members: tuple[Member, ...], device: torch.device) -> Tensor:
    """The members as int64 ``[G, 2]`` on the device: one tensor for equal members, kept as long as the process."""
    return _PLACED(members, device)


# All that torch.compiler.assume_constant_result does: a traced call holds the tensor itself. Calling it would load the
# compiler, and Triton with it, into every process that imports this module.
vars(place_members)["_dynamo_marked_constant"] = True


def _check_number(where: str, name: str, value: int, least: int) -> None:
    """Plain numbers stay in int32, which keeps every product of two of them in int64."""
    if not least <= value <= INT32_MAX:
        raise ArgumentError(f"{where}.{name}", f"got {value}", f"must be in [{least}, {INT32_MAX}]")


def _check_context_parallel(where: str, context_parallel: ContextParallel, block_size: int) -> None:
    size, rank, interleave = context_parallel
    _check_number(where, "context_parallel.size", size, 1)
    if not 0 <= rank < size:
        raise ArgumentError(f"{where}.context_parallel.rank", f"got {rank}", f"must be in [0, {size - 1}]")
    if interleave < 1 or block_size % interleave:
        raise ArgumentError(
            f"{where}.context_parallel.interleave", f"got {interleave}", f"must divide block_size = {block_size}"
        )


def operator_call(
    topk: Tensor,
    request_of_row: Tensor,
    block_table: Tensor,
    members: Tensor,
    block_size: int,
    num_blocks: int,
    compact: bool,
    cp_size: int,
    cp_rank: int,
    cp_interleave: int,
    prefill_rows: Tensor | None,
    workspace_starts: Tensor | None,
    rank_stride: int,
    physical: Tensor,
    valid: Tensor | None,
    counters: Tensor | None,
) -> RemapCall:
    """The call that the operator's arguments make, with counters as implementations want them."""
    workspace = None
    if prefill_rows is not None and workspace_starts is not None:
        workspace = PrefillWorkspace(prefill_rows, workspace_starts, rank_stride)
    if counters is not None and counters.dim() == 1:
        counters = counters.unsqueeze(0)
    return RemapCall(
        topk,
        request_of_row,
        block_table,
        members,
        block_size,
        num_blocks,
        compact,
        ContextParallel(cp_size, cp_rank, cp_interleave),
        workspace,
        physical,
        valid,
        counters,
    )


def _run(*arguments: Any) -> None:
    """The registered operator on a real device."""
    call = operator_call(*arguments)
    if call.physical.numel() > 0:
        implementation_for(call.topk.device.type).remap_into(call)
    elif call.valid is not None:
        call.valid.zero_()


# Library.define and impl rather than custom_op, whose wrapper costs several times as much at each call.
_LIBRARY = torch.library.Library("kvplugin", "FRAGMENT")  # type: ignore[no-untyped-call]
REMAP_SCHEMA = (
    "Tensor request_of_row, Tensor block_table, Tensor members, int block_size, int num_blocks, bool compact, "
    "int cp_size, int cp_rank, int cp_interleave, Tensor? prefill_rows, Tensor? workspace_starts, int rank_stride, "
    "Tensor(x!) physical, Tensor(y!)? valid, Tensor(z!)? remap_counters"
)
"""The operator's arguments after ``topk``."""
_LIBRARY.define(f"remap_grouped(Tensor topk, {REMAP_SCHEMA}) -> ()")  # type: ignore[no-untyped-call]
for _key in ("CPU", "CUDA"):
    _LIBRARY.impl("remap_grouped", _run, _key)  # type: ignore[no-untyped-call]
# Tracing needs no more than the arguments: every result is one of them.
torch.library.register_fake("kvplugin::remap_grouped", lambda *arguments: None, lib=_LIBRARY)
