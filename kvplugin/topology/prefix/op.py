"""The public function of the stable-prefix count: argument checks and the choice of implementation."""

from __future__ import annotations

from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from kvplugin.forms import form_for
from kvplugin.tensor_checks import check_tensor
from kvplugin.topology.prefix.call import PrefixCall
from kvplugin.topology.prefix.counters import PrefixCounter

_INTEGERS = (torch.int32, torch.int64)


@cache
def implementation_for(device_type: str) -> ModuleType:
    """numba on the CPU, vectorised torch everywhere else."""
    return form_for(
        device_type, "kvplugin.topology.prefix", "torch_ops", "prefixes are counted in torch", compilers=["numba"]
    )


def count_stable_prefix(
    selection: Tensor,
    row_lengths: Tensor,
    row_prefix: Tensor,
    *,
    counting: Tensor,
    counters: Tensor,
    row_live: Tensor | None = None,
    row_phase: Tensor | None = None,
    row_arm: Tensor | None = None,
) -> None:
    """Count what rows see of their request's stable prefix, and what of it they do not select; waits for no device.

    Args:
        selection: int32 or int64 ``[T, K]``, logical indices, each at most once in a row; -1 = unused.
        row_lengths: int32 or int64 ``[T]``, tokens each row may see.
        row_prefix: int32 ``[T]``, tokens of each row's stable prefix; 0 or less = none, the row is left out.
        counting: int32 ``[arms]``, 1 for arms whose rows are counted.
        counters: int64 ``[arms, 2, len(PrefixCounter)]``, added to.
        row_live: bool ``[T]``; default all.
        row_phase: int8 ``[T]``, 0 prefill and 1 decode; default decode.
        row_arm: int32 ``[T]``; default 0. Rows of an unknown arm are left out.

    Raises:
        ArgumentError: a wrong shape, dtype or device.
    """
    where, device = "count_stable_prefix", selection.device
    check_tensor(where, "selection", selection, ("T", "K"), _INTEGERS, device)
    rows = (selection.shape[0],)
    check_tensor(where, "row_lengths", row_lengths, rows, _INTEGERS, device)
    check_tensor(where, "row_prefix", row_prefix, rows, (torch.int32,), device)
    check_tensor(where, "counting", counting, ("arms",), (torch.int32,), device)
    check_tensor(where, "counters", counters, (len(counting), 2, len(PrefixCounter)), (torch.int64,), device)
    for name, tensor, dtype in (
        ("row_live", row_live, torch.bool),
        ("row_phase", row_phase, torch.int8),
        ("row_arm", row_arm, torch.int32),
    ):
        if tensor is not None:
            check_tensor(where, name, tensor, rows, (dtype,), device)
    call = PrefixCall(selection, row_lengths, row_prefix, row_live, row_phase, row_arm, counting, counters)
    if selection.shape[0]:
        implementation_for(device.type).count_into(call)
