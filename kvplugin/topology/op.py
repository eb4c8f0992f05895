"""The policy's public functions: argument checks and the choice of implementation by device."""

from __future__ import annotations

import logging
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from kvplugin.config import MismatchAction, Mode, PolicyConfig, Witness, before_topk_conflicts
from kvplugin.errors import ArgumentError, CoordinateError
from kvplugin.topology.call import LiftCall, PolicyCall
from kvplugin.topology.counters import PHASE_ROWS, Counter, new_counters
from kvplugin.topology.params import PolicyParams, lower

logger = logging.getLogger(__name__)

INDEX_DTYPES = (torch.int32, torch.int64)
SCORE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOWER_AGAIN = "lower it for this width"


@cache
def implementation_for(device_type: str) -> ModuleType:
    """The module that serves a device: numba on the CPU where it can be imported, vectorised torch elsewhere.

    Imported on first use: a process that only validates a configuration loads no compiler.
    """
    if device_type == "cpu":
        try:
            return import_module("kvplugin.topology.numba_ops")
        except ImportError as error:
            logger.warning("kvplugin: numba cannot be used (%s); the policy runs in its slower torch form", error)
    return import_module("kvplugin.topology.torch_ops")


def apply_topology_policy(
    topk: Tensor,
    row_lengths: Tensor,
    *,
    config: PolicyConfig | PolicyParams,
    row_live: Tensor | None = None,
    row_phase: Tensor | None = None,
    offsets: Tensor | None = None,
    scores: Tensor | None = None,
    score_start: Tensor | None = None,
    witness_scores: Tensor | None = None,
    counters: Tensor | None = None,
    error: Tensor | None = None,
) -> Tensor:
    """Rewrite a batch of learned top-k rows in place so that structural tokens are attended to inside the same budget.

    Rows are sets: valid entries come first, in no promised order, then -1 up to the unchanged width. No host
    synchronisation on any device. A row with L < 0, or not live, is neither read nor written.

    Args:
        topk: int32 or int64 ``[T, K]`` or ``[T, 1, K]``, any strides; -1 = unused slot.
        row_lengths: int32 or int64 ``[T]``, the number of KV tokens each row may see.
        config: the policy; pass :class:`PolicyParams` (see :func:`lower`) where the call is hot.
        row_live: bool ``[T]``; default all.
        row_phase: int8 ``[T]``, 0 prefill and 1 decode; default decode.
        offsets: int32 or int64 ``[T]``, added to every token of the row (ragged layouts); default 0.
        scores: float32, bfloat16 or float16 ``[T, N]``, the indexer's scores; column ``score_start[t] + token``.
        score_start: int32 or int64 ``[T]``; default 0.
        witness_scores: float32 or float64 ``[T, B]``, one score per policy block, for ``witness: drift``.
        counters: int64 ``[2, len(Counter)]`` to add to; default a new buffer.
        error: int64 ``[4]``, needed with ``coordinate_mismatch: raise``; see :func:`raise_recorded`.

    Returns:
        The counter buffer.

    Raises:
        ArgumentError: a wrong shape, dtype or device, scores or witness scores missing, or structure beyond the cap.
    """
    where = "apply_topology_policy"
    if topk.dim() == 3 and topk.shape[1] == 1:
        topk = topk.squeeze(1)
    _check(where, "topk", topk, ("T", "K"), INDEX_DTYPES, topk.device)
    rows, width = topk.shape
    if width == 0:
        raise ArgumentError(f"{where}.topk", "width 0", "a row needs at least one slot")
    params = config if isinstance(config, PolicyParams) else lower(config, width)
    if params.width != width:
        raise ArgumentError(f"{where}.config", f"lowered for width {params.width}, topk has width {width}", LOWER_AGAIN)
    device = topk.device
    counters = new_counters(device) if counters is None else counters
    _check(where, "counters", counters, (len(PHASE_ROWS), len(Counter)), (torch.int64,), device)
    _check_rows(where, rows, device, row_lengths, row_live, row_phase, score_start)
    if offsets is not None:
        _check(where, "offsets", offsets, (rows,), INDEX_DTYPES, device)
    if scores is not None:
        _check(where, "scores", scores, (rows, "N"), SCORE_DTYPES, device)
    elif params.needs_scores:
        raise ArgumentError(
            f"{where}.scores",
            f"None with eviction = {params.eviction}",
            "give the indexer's scores, or another eviction",
        )
    if witness_scores is not None:
        _check(where, "witness_scores", witness_scores, (rows, "B"), (torch.float32, torch.float64), device)
    elif params.witness is Witness.DRIFT and params.witness_blocks and params.mode is not Mode.DISABLED:
        raise ArgumentError(f"{where}.witness_scores", "None with witness = drift", "give one score per policy block")
    if error is not None:
        _check(where, "error", error, (4,), (torch.int64,), device)
    elif params.mismatch is MismatchAction.RAISE and params.mode is not Mode.DISABLED:
        raise ArgumentError(f"{where}.error", "None with coordinate_mismatch = raise", "give an int64 [4] buffer")
    if params.mode is not Mode.DISABLED and rows:
        implementation_for(device.type).apply_into(
            PolicyCall(
                topk,
                row_lengths,
                row_live,
                row_phase,
                offsets,
                scores,
                score_start,
                witness_scores,
                params,
                counters,
                error,
            )
        )
    return counters


def lift_structural_scores(
    scores: Tensor,
    row_lengths: Tensor,
    *,
    config: PolicyConfig | PolicyParams,
    width: int,
    row_live: Tensor | None = None,
    row_phase: Tensor | None = None,
    score_start: Tensor | None = None,
) -> None:
    """Raise the scores of structural tokens to +inf, in place, so that any top-k kernel returns them (``before_topk``).

    For finite scores the top-k of the lifted row is the set that :func:`apply_topology_policy` would select. Rows whose
    window ``[score_start, score_start + L)`` is not inside ``scores`` are left alone, as are columns outside it.

    Args:
        scores: float32, bfloat16 or float16 ``[T, N]``.
        row_lengths, row_live, row_phase, score_start: as in :func:`apply_topology_policy`.
        config: a policy with a merge mode, ``lowest_score`` and uniform witnesses.
        width: K of the top-k that will read the scores.

    Raises:
        ArgumentError: a wrong shape, dtype or device, or a policy that a lift cannot express.
    """
    where = "lift_structural_scores"
    device = scores.device
    _check(where, "scores", scores, ("T", "N"), SCORE_DTYPES, device)
    _check_rows(where, scores.shape[0], device, row_lengths, row_live, row_phase, score_start)
    if isinstance(config, PolicyConfig):
        for key, found, cure in before_topk_conflicts(config):
            raise ArgumentError(f"{where}.config", f"{key}: {found}", cure)
        config = lower(config, width)
    if config.width != width:
        raise ArgumentError(f"{where}.config", f"lowered for width {config.width}, width is {width}", LOWER_AGAIN)
    if scores.shape[0]:
        implementation_for(device.type).lift_into(
            LiftCall(scores, row_lengths, row_live, row_phase, score_start, config)
        )


def raise_recorded(error: Tensor) -> None:
    """Raise the coordinate mismatch that a call recorded, if any (this waits for the device).

    Raises:
        CoordinateError: naming row, value and interval.
    """
    row, value, low, high = error.tolist()
    if row:
        raise CoordinateError(row - 1, value, low, high)


def _check_rows(
    where: str,
    rows: int,
    device: torch.device,
    row_lengths: Tensor,
    row_live: Tensor | None,
    row_phase: Tensor | None,
    score_start: Tensor | None,
) -> None:
    _check(where, "row_lengths", row_lengths, (rows,), INDEX_DTYPES, device)
    if row_live is not None:
        _check(where, "row_live", row_live, (rows,), (torch.bool,), device)
    if row_phase is not None:
        _check(where, "row_phase", row_phase, (rows,), (torch.int8,), device)
    if score_start is not None:
        _check(where, "score_start", score_start, (rows,), INDEX_DTYPES, device)


def _check(
    where: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """The one shape, dtype and device check; a letter in ``shape`` stands for any size."""
    fits = tensor.dim() == len(shape) and all(
        isinstance(want, str) or want == size for want, size in zip(shape, tensor.shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        found = f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}"
        raise ArgumentError(
            f"{where}.{name}", f"got {found}", f"must be {kinds} [{', '.join(map(str, shape))}] on {device}"
        )
