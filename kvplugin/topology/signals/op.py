"""The public function of the signals: argument checks and the choice of implementation."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from kvplugin.errors import ArgumentError
from kvplugin.forms import form_for
from kvplugin.tensor_checks import check_tensor
from kvplugin.topology.counters import PHASE_ROWS
from kvplugin.topology.op import INDEX_DTYPES, SCORE_DTYPES
from kvplugin.topology.signals.call import SignalCall
from kvplugin.topology.signals.counters import SignalColumn
from kvplugin.topology.signals.memory import SignalMemory
from kvplugin.topology.table import PolicyTable

RAREST = 2**31 - 1
"""Largest ``every``: kernels hold it in 32 bits."""


@cache
def implementation_for(device_type: str) -> ModuleType:
    """The module that serves a device: Triton on GPUs, numba on the CPU, vectorised torch where these are missing."""
    return form_for(device_type, "kvplugin.topology.signals", "torch_ops", "signals are observed in slower torch")


def observe_signals(
    learned: Tensor,
    row_lengths: Tensor,
    *,
    config: PolicyTable,
    counters: Tensor,
    every: int,
    scores: Tensor | None = None,
    score_start: Tensor | None = None,
    row_live: Tensor | None = None,
    row_phase: Tensor | None = None,
    row_arm: Tensor | None = None,
    row_request: Tensor | None = None,
    memory: SignalMemory | None = None,
    leader: int = -1,
) -> None:
    """Add the signals of sampled rows to histograms; waits for no device, and may be captured in a graph.

    Which rows are sampled follows from their length and request alone, so that all tensor-parallel ranks, all layers
    and every replay of a graph agree on it without a state. Samples come in bursts of 8 consecutive lengths, because
    a step can only be compared with the one before it.

    Args:
        learned: int32 or int64 ``[T, K]``, what the indexer's top-k returned, before the policy rewrote it; any
            strides; -1 = unused slot. Only read. Rows are sets: where an index stands in two slots, signals are only
            promised to stay in range.
        row_lengths: int32 or int64 ``[T]``, tokens each row may see.
        config: the arms' policies; rows of an arm that is off, or not in the row's phase, are left out.
        counters: int64 ``[arms, 2, len(SignalColumn)]``, contiguous, added to.
        every: sample one of so many bursts; 1 = every row.
        scores: float32, bfloat16 or float16 ``[T, N]``, the indexer's scores; column ``score_start[t] + token``.
        score_start: int32 or int64 ``[T]``; default 0.
        row_live: bool ``[T]``; default all.
        row_phase: int8 ``[T]``, 0 prefill and 1 decode; default decode.
        row_arm: int32 ``[T]``; default 0. Rows of an unknown arm are left out.
        row_request: int32 ``[T]``, a stable key of each row's request; default 0, and no overlaps.
        memory: what earlier calls learned; needed for overlaps, and changed.
        leader: ordinal of this indexer layer in ``memory``; no overlaps where it has no such layer.

    Raises:
        ArgumentError: a wrong shape, dtype, device or value.
    """
    where, device = "observe_signals", learned.device
    check_tensor(where, "learned", learned, ("T", "K"), INDEX_DTYPES, device)
    rows, width = learned.shape
    if config.width != width:
        raise ArgumentError(
            f"{where}.config", f"lowered for width {config.width}, width is {width}", "use equal widths"
        )
    if config.rows.device != device:
        raise ArgumentError(f"{where}.config", f"a table on {config.rows.device}", f"make it on {device}")
    if not 1 <= every <= RAREST:
        raise ArgumentError(f"{where}.every", f"got {every}", f"use 1 to {RAREST}")
    shape = (len(config.rows), len(PHASE_ROWS), len(SignalColumn))
    check_tensor(where, "counters", counters, shape, (torch.int64,), device)
    if not counters.is_contiguous():
        found = f"strides {counters.stride()} of shape {tuple(counters.shape)}"
        raise ArgumentError(f"{where}.counters", found, "give a contiguous buffer")
    check_tensor(where, "row_lengths", row_lengths, (rows,), INDEX_DTYPES, device)
    if scores is not None:
        check_tensor(where, "scores", scores, (rows, "N"), SCORE_DTYPES, device)
    for name, tensor, dtypes in (
        ("score_start", score_start, INDEX_DTYPES),
        ("row_live", row_live, (torch.bool,)),
        ("row_phase", row_phase, (torch.int8,)),
        ("row_arm", row_arm, (torch.int32,)),
        ("row_request", row_request, (torch.int32,)),
    ):
        if tensor is not None:
            check_tensor(where, name, tensor, (rows,), dtypes, device)
    tokens = tags = None
    if memory is not None:
        check_tensor(where, "memory", memory.tokens, ("leaders", "slots", width), (torch.int32,), device)
        if row_request is not None and 0 <= leader < len(memory.tokens):
            tokens, tags = memory.tokens, memory.tags
    if rows:
        implementation_for(device.type).observe_into(
            SignalCall(
                learned,
                row_lengths,
                row_live,
                row_phase,
                row_arm,
                row_request,
                scores,
                score_start,
                config.rows,
                config.enabled,
                every,
                counters,
                tokens,
                tags,
                0 if tokens is None else leader,
            )
        )
