"""Columns of the stable-prefix counters, one row per phase."""

from __future__ import annotations

from enum import IntEnum, unique

import torch
from torch import Tensor

from kvplugin.topology.counters import PHASE_ROWS


@unique
class PrefixCounter(IntEnum):
    """Column of a stable-prefix counter buffer, over live rows with a stable prefix that see at least one token."""

    ROWS = 0
    VISIBLE = 1
    UNSELECTED = 2


def new_prefix_counters(device: torch.device | str = "cpu", arms: int = 1) -> Tensor:
    """A zeroed buffer: int64 ``[arms, 2, len(PrefixCounter)]``, row 0 prefill, row 1 decode."""
    return torch.zeros(arms, len(PHASE_ROWS), len(PrefixCounter), dtype=torch.int64, device=device)
