"""The policy's public functions: argument checks, the registered operators, and the choice of implementation."""

from __future__ import annotations

from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kvplugin.config import MismatchAction, Mode, PolicyConfig, Witness, before_topk_conflicts
from kvplugin.errors import ArgumentError, CoordinateError
from kvplugin.forms import form_for
from kvplugin.tensor_checks import check_tensor
from kvplugin.topology.arms import apply_arms_into, lift_arms_into
from kvplugin.topology.call import ArmsCall, LiftArmsCall
from kvplugin.topology.counters import PHASE_ROWS, Counter, new_counters
from kvplugin.topology.params import PolicyParams, lower
from kvplugin.topology.table import PolicyTable, table_of

INDEX_DTYPES = (torch.int32, torch.int64)
SCORE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LOWER_AGAIN = "lower it for this width"
Policies = PolicyConfig | PolicyParams | PolicyTable


@cache
def implementation_for(device_type: str) -> ModuleType:
    """The module that serves a device: Triton on GPUs, numba on the CPU, vectorised torch where these are missing."""
    return form_for(device_type, "kvplugin.topology", "torch_ops", "the policy runs in its slower torch form")


def apply_topology_policy(
    topk: Tensor,
    row_lengths: Tensor,
    *,
    config: Policies,
    row_live: Tensor | None = None,
    row_phase: Tensor | None = None,
    row_arm: Tensor | None = None,
    offsets: Tensor | None = None,
    scores: Tensor | None = None,
    score_start: Tensor | None = None,
    witness_scores: Tensor | None = None,
    counters: Tensor | None = None,
    error: Tensor | None = None,
) -> Tensor:
    """Rewrite a batch of learned top-k rows in place so that structural tokens are attended to inside the same budget.

    Rows are sets: valid entries come first, in no promised order, then -1 up to the unchanged width. No host
    synchronisation on any device. A row with L < 0, or not live, is neither read nor written. On a GPU the call may be
    captured in a graph: all it reads, the policies of a :class:`PolicyTable` too, may change between replays.

    Args:
        topk: int32 or int64 ``[T, K]`` or ``[T, 1, K]``, any strides; -1 = unused slot. An index must not stand in two
            slots; rows where one does are only promised to stay in range (``check_duplicates`` looks for them).
        row_lengths: int32 or int64 ``[T]``, the number of KV tokens each row may see.
        config: the policy; pass :class:`PolicyParams` (see :func:`lower`) or a :class:`PolicyTable` where the call is
            hot, the latter where rows follow different policies, or policies change under a captured graph.
        row_live: bool ``[T]``; default all.
        row_phase: int8 ``[T]``, 0 prefill and 1 decode; default decode.
        row_arm: int32 ``[T]``, each row's arm of the table; default 0. Rows of an unknown arm are bypassed.
        offsets: int32 or int64 ``[T]``, added to every token of the row (ragged layouts); default 0.
        scores: float32, bfloat16 or float16 ``[T, N]``, the indexer's scores; column ``score_start[t] + token``. Rows
            that need scores are bypassed where a table's call has none.
        score_start: int32 or int64 ``[T]``; default 0.
        witness_scores: float32 or float64 ``[T, B]``, one score per policy block, for ``witness: drift``.
        counters: int64 ``[2, len(Counter)]``, with a table of several arms ``[arms, 2, len(Counter)]``, perhaps with a
            leading dimension of stripes, to add to; default a new buffer.
        error: int64 ``[4]``, needed with ``coordinate_mismatch: raise``; see :func:`raise_recorded`.

    Returns:
        The counter buffer.

    Raises:
        ArgumentError: a wrong shape, dtype or device, scores or witness scores missing, or structure beyond the cap.
    """
    call = checked_call(
        "apply_topology_policy",
        topk,
        row_lengths,
        config=config,
        row_live=row_live,
        row_phase=row_phase,
        row_arm=row_arm,
        offsets=offsets,
        scores=scores,
        score_start=score_start,
        witness_scores=witness_scores,
        counters=counters,
        error=error,
    )
    torch.ops.kvplugin.topology_policy(*call)
    return call.counters


def lift_structural_scores(
    scores: Tensor,
    row_lengths: Tensor,
    *,
    config: Policies,
    width: int,
    row_live: Tensor | None = None,
    row_phase: Tensor | None = None,
    row_arm: Tensor | None = None,
    score_start: Tensor | None = None,
    ranks: int = 1,
    rank: int = 0,
    interleave: int = 1,
) -> None:
    """Raise the scores of structural tokens to +inf, in place, so that any top-k kernel returns them (``before_topk``).

    For finite scores the top-k of the lifted row is the set that :func:`apply_topology_policy` would select. Rows whose
    window ``[score_start, score_start + L)`` is not inside ``scores`` are left alone, as are columns outside it, and
    rows of an arm whose mode does not merge.

    Args:
        scores: float32, bfloat16 or float16 ``[T, N]``.
        row_lengths, row_live, row_phase, row_arm, score_start: as in :func:`apply_topology_policy`.
        config: a policy with a merge mode, ``lowest_score`` and uniform witnesses.
        width: K of the top-k that will read the scores.
        ranks, rank, interleave: for context parallelism. Rank ``(token // interleave) % ranks`` has a token's score,
            side by side with its others, and this is ``rank``. Lengths are those of the whole row, on all ranks.

    Raises:
        ArgumentError: a wrong shape, dtype or device, a rank that does not exist, or a policy that a lift cannot
            express.
    """
    where = "lift_structural_scores"
    if not (0 <= rank < ranks and interleave > 0):
        found = f"rank {rank} of {ranks}, interleave {interleave}"
        raise ArgumentError(f"{where}.ranks", found, "use 0 <= rank < ranks and interleave >= 1")
    device = scores.device
    check_tensor(where, "scores", scores, ("T", "N"), SCORE_DTYPES, device)
    _check_rows(where, scores.shape[0], device, row_lengths, row_live, row_phase, row_arm, score_start)
    if isinstance(config, PolicyConfig):
        for key, found, cure in before_topk_conflicts(config):
            raise ArgumentError(f"{where}.config", f"{key}: {found}", cure)
    table = _table(where, config, width, scores)
    if not table.can_lift:
        found = "a merge with another eviction than lowest_score, or with witnesses without a closed form"
        raise ArgumentError(f"{where}.config", found, "use lowest_score and uniform witnesses in all arms")
    torch.ops.kvplugin.lift_structural_scores(
        scores,
        row_lengths,
        row_live,
        row_phase,
        row_arm,
        score_start,
        table.rows,
        table.enabled,
        width,
        ranks,
        rank,
        interleave,
    )


def raise_recorded(error: Tensor) -> None:
    """Raise the coordinate mismatch that a call recorded, if any (this waits for the device).

    Raises:
        CoordinateError: naming row, value and interval.
    """
    row, value, low, high = error.tolist()
    if row:
        raise CoordinateError(row - 1, value, low, high)


def checked_call(
    where: str,
    topk: Tensor,
    row_lengths: Tensor,
    *,
    config: Policies,
    row_live: Tensor | None = None,
    row_phase: Tensor | None = None,
    row_arm: Tensor | None = None,
    offsets: Tensor | None = None,
    scores: Tensor | None = None,
    score_start: Tensor | None = None,
    witness_scores: Tensor | None = None,
    counters: Tensor | None = None,
    error: Tensor | None = None,
    counters_name: str = "counters",
) -> ArmsCall:
    """The arguments of :func:`apply_topology_policy` as those of its operator, with counters of any accepted shape.

    Raises:
        ArgumentError: as there, under the name ``where``.
    """
    if topk.dim() == 3 and topk.shape[1] == 1:
        topk = topk.squeeze(1)
    device = topk.device
    check_tensor(where, "topk", topk, ("T", "K"), INDEX_DTYPES, device)
    rows, width = topk.shape
    if width == 0:
        raise ArgumentError(f"{where}.topk", "width 0", "a row needs at least one slot")
    table = _table(where, config, width, topk)
    arms = len(table.rows)
    if counters is None:
        counters = new_counters(device) if arms == 1 else new_counters(device, arms)
    _check_counters(where, counters_name, counters, arms, device)
    _check_rows(where, rows, device, row_lengths, row_live, row_phase, row_arm, score_start)
    if offsets is not None:
        check_tensor(where, "offsets", offsets, (rows,), INDEX_DTYPES, device)
    if scores is not None:
        check_tensor(where, "scores", scores, (rows, "N"), SCORE_DTYPES, device)
    if witness_scores is not None:
        check_tensor(where, "witness_scores", witness_scores, (rows, "B"), (torch.float32, torch.float64), device)
    if error is not None:
        check_tensor(where, "error", error, (4,), (torch.int64,), device)
    if not isinstance(config, PolicyTable):
        params = config if isinstance(config, PolicyParams) else lower(config, width)
        _check_companions(where, params, scores, witness_scores, error)
    return ArmsCall(
        topk,
        row_lengths,
        row_live,
        row_phase,
        row_arm,
        offsets,
        scores,
        score_start,
        witness_scores,
        table.rows,
        table.enabled,
        table.listed_witnesses,
        counters,
        error,
    )


def operator_call(*arguments: Any) -> ArmsCall:
    """The call that the operator's arguments make, with counters as implementations want them."""
    call = ArmsCall(*arguments)
    shape = (-1, len(call.policies), len(PHASE_ROWS), len(Counter))
    return call._replace(counters=call.counters.view(shape))


def _table(where: str, config: Policies, width: int, like: Tensor) -> PolicyTable:
    """The table that holds the policy, on the device of the call's first tensor."""
    device = like.device
    if isinstance(config, PolicyConfig):
        config = lower(config, width)
    if config.width != width:
        raise ArgumentError(f"{where}.config", f"lowered for width {config.width}, width is {width}", LOWER_AGAIN)
    if isinstance(config, PolicyParams):
        # A fake tensor's table is fake as well, and must not be kept.
        return table_of(config, device) if type(like) is Tensor else PolicyTable([config], device)
    if config.rows.device != device:
        raise ArgumentError(f"{where}.config", f"a table on {config.rows.device}", f"make it on {device}")
    return config


def _check_counters(where: str, name: str, counters: Tensor, arms: int, device: torch.device) -> None:
    leading: tuple[int | str, ...] = ((), (arms,), ("S", arms))[min(max(counters.dim() - 2, 0 if arms == 1 else 1), 2)]
    check_tensor(where, name, counters, (*leading, len(PHASE_ROWS), len(Counter)), (torch.int64,), device)
    if not counters.is_contiguous() or counters.numel() == 0:
        found = f"strides {counters.stride()} of shape {tuple(counters.shape)}"
        raise ArgumentError(f"{where}.{name}", found, "give a contiguous buffer with at least one stripe")


def _check_companions(
    where: str, params: PolicyParams, scores: Tensor | None, witness_scores: Tensor | None, error: Tensor | None
) -> None:
    """What one policy needs beside the rows; in a table it depends on the row, and what is missing is counted."""
    if scores is None and params.needs_scores:
        found = f"None with eviction = {params.eviction}"
        raise ArgumentError(f"{where}.scores", found, "give the indexer's scores, or another eviction")
    if params.mode is Mode.DISABLED:
        return
    if witness_scores is None and params.witness is Witness.DRIFT and params.witness_blocks:
        raise ArgumentError(f"{where}.witness_scores", "None with witness = drift", "give one score per policy block")
    if error is None and params.mismatch is MismatchAction.RAISE:
        raise ArgumentError(f"{where}.error", "None with coordinate_mismatch = raise", "give an int64 [4] buffer")


def _check_rows(
    where: str,
    rows: int,
    device: torch.device,
    row_lengths: Tensor,
    row_live: Tensor | None,
    row_phase: Tensor | None,
    row_arm: Tensor | None,
    score_start: Tensor | None,
) -> None:
    check_tensor(where, "row_lengths", row_lengths, (rows,), INDEX_DTYPES, device)
    if row_live is not None:
        check_tensor(where, "row_live", row_live, (rows,), (torch.bool,), device)
    if row_phase is not None:
        check_tensor(where, "row_phase", row_phase, (rows,), (torch.int8,), device)
    if row_arm is not None:
        check_tensor(where, "row_arm", row_arm, (rows,), (torch.int32,), device)
    if score_start is not None:
        check_tensor(where, "score_start", score_start, (rows,), INDEX_DTYPES, device)


def _apply(topk: Tensor, *arguments: Any) -> None:
    """The registered operator on a real device."""
    if topk.shape[0] == 0:
        return
    call, implementation = operator_call(topk, *arguments), implementation_for(topk.device.type)
    # Only kernels read policies on the device.
    if topk.is_cuda:
        implementation.apply_arms_into(call)
    else:
        apply_arms_into(implementation, call)


def _lift(scores: Tensor, *arguments: Any) -> None:
    """The registered operator on a real device."""
    if scores.numel() == 0:
        return
    implementation, call = implementation_for(scores.device.type), LiftArmsCall(scores, *arguments)
    if scores.is_cuda:
        implementation.lift_arms_into(call)
    else:
        lift_arms_into(implementation, call)


# Library.define and impl rather than custom_op, whose wrapper costs several times as much at each call.
_LIBRARY = torch.library.Library("kvplugin", "FRAGMENT")  # type: ignore[no-untyped-call]
_ROWS = "Tensor row_lengths, Tensor? row_live, Tensor? row_phase, Tensor? row_arm"
POLICY_SCHEMA = (
    f"Tensor(a!) topk, {_ROWS}, Tensor? offsets, Tensor? scores, Tensor? score_start, Tensor? witness_scores, "
    "Tensor policies, Tensor enabled, int listed_witnesses, Tensor(b!) counters, Tensor(c!)? error"
)
"""The policy operator's arguments."""
_SCHEMAS = {
    "topology_policy": POLICY_SCHEMA,
    "lift_structural_scores": (
        f"Tensor(a!) scores, {_ROWS}, Tensor? score_start, Tensor policies, Tensor enabled, int width, "
        "int ranks=1, int rank=0, int interleave=1"
    ),
}
for _name, _run in (("topology_policy", _apply), ("lift_structural_scores", _lift)):
    _LIBRARY.define(f"{_name}({_SCHEMAS[_name]}) -> ()")  # type: ignore[no-untyped-call]
    for _key in ("CPU", "CUDA"):
        _LIBRARY.impl(_name, _run, _key)  # type: ignore[no-untyped-call]
    # Tracing needs no more than the arguments: every result is one of them.
    torch.library.register_fake(f"kvplugin::{_name}", lambda *arguments: None, lib=_LIBRARY)
