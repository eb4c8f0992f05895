"""What the remap counts: slots that hold something, yet have no physical row, by the first reason."""

from __future__ import annotations

from enum import IntEnum, unique

import torch
from torch import Tensor


@unique
class RemapCounter(IntEnum):
    """Column of a counter buffer; reasons in the order in which they are tried, each slot under the first.

    Not counted: unused slots (-1), and tokens that another context-parallel rank holds. Each slot counts once a call,
    whatever the number of members.

    Attributes:
        INVALID_TOKEN: negative, but not -1.
        INVALID_REQUEST: the row's request (of a prefill row: its workspace) does not exist.
        INVALID_BLOCK: the token lies beyond the last column of the block table.
        INVALID_PAGE: the table's entry is negative (padding), or is no block of the pool.
        OVERFLOW: the physical row of at least one member does not fit int32.
    """

    INVALID_TOKEN = 0
    INVALID_REQUEST = 1
    INVALID_BLOCK = 2
    INVALID_PAGE = 3
    OVERFLOW = 4


def new_remap_counters(device: torch.device | str = "cpu", stripes: int | None = None) -> Tensor:
    """A zeroed counter buffer: int64 ``[len(RemapCounter)]``, or ``[stripes, len(RemapCounter)]``.

    With stripes, row t of a call adds to stripe ``t % stripes``, so that many rows do not meet at one address.
    """
    shape = (len(RemapCounter),) if stripes is None else (stripes, len(RemapCounter))
    return torch.zeros(shape, dtype=torch.int64, device=device)
