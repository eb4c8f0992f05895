"""How layers come by their physical indices, and the counter of each way."""

from __future__ import annotations

from enum import IntEnum, unique

import torch
from torch import Tensor


@unique
class RemapPath(IntEnum):
    """Column of a counter buffer; one of these for each layer and step.

    Attributes:
        GROUPED: converted, by a leader for its whole group.
        MEMO: read from the leader's conversion; the only path without a conversion.
        PER_LAYER: converted for this layer alone: grouping is off, or the layer's group is inactive.
        FALLBACK: converted for this layer alone, because what its leader left could not be used.
    """

    GROUPED = 0
    MEMO = 1
    PER_LAYER = 2
    FALLBACK = 3


def new_path_counters() -> Tensor:
    """A zeroed counter buffer: int64 ``[len(RemapPath)]``, in host memory: the host decides which way a layer goes."""
    return torch.zeros(len(RemapPath), dtype=torch.int64)
