"""What the policy counts: the columns of the int64 counter buffer, one row per phase."""

from __future__ import annotations

from enum import IntEnum, unique

import torch
from torch import Tensor

from kvplugin.config import Phase

PHASE_ROWS: tuple[Phase, ...] = (Phase.PREFILL, Phase.DECODE)
"""Phase of each row of a counter buffer, and of each value of ``row_phase``."""


@unique
class Counter(IntEnum):
    """Column of a counter buffer.

    Rows: ``SEEN`` = live rows with L >= 0 = ``REWRITTEN`` + ``IDENTITY`` + all ``BYPASS_*``. ``RESCUED`` (L > 0 and no
    valid learned token), ``FALLBACK`` (coordinate mismatch) and ``EMPTY`` (leaves without a token although L > 0, as
    ``observe`` and ``fill: none`` allow) are kinds of row among those that were not bypassed. ``BYPASS_UNKNOWN_ARM``
    is counted for arm 0.

    Tokens, over rows that were not bypassed: ``KEPT`` = learned and selected, ``EVICTED`` = learned and not selected,
    ``INJECTED`` = structural, selected, not learned, ``BACKFILLED`` = the rest of the selection. ``INVALID`` = slots
    that hold neither -1 nor a valid index. ``*_HIT`` of ``*_POSSIBLE`` structural tokens were already learned, each
    token under one kind (sink before local before witness); rows that fell back have no structure and add nothing.
    ``SEGMENTS_*``: coverage segments that hold at least one visible token, and those without a learned token before and
    without a selected token after the policy.
    """

    SEEN = 0
    REWRITTEN = 1
    IDENTITY = 2
    RESCUED = 3
    FALLBACK = 4
    EMPTY = 5
    BYPASS_MAX_WIDTH = 6
    BYPASS_MAX_ROWS = 7
    BYPASS_MAX_ELEMENTS = 8
    BYPASS_PHASE = 9
    BYPASS_MAX_ROW_LENGTH = 10
    BYPASS_BAD_OFFSET = 11
    BYPASS_NO_SCORES = 12
    BYPASS_UNKNOWN_ARM = 13
    KEPT = 14
    EVICTED = 15
    INJECTED = 16
    BACKFILLED = 17
    INVALID = 18
    SINK_HIT = 19
    SINK_POSSIBLE = 20
    LOCAL_HIT = 21
    LOCAL_POSSIBLE = 22
    WITNESS_HIT = 23
    WITNESS_POSSIBLE = 24
    SEGMENTS = 25
    SEGMENTS_EMPTY_BEFORE = 26
    SEGMENTS_EMPTY_AFTER = 27


BYPASS_REASONS: dict[str, Counter] = {
    counter.name.removeprefix("BYPASS_").lower(): counter for counter in Counter if counter.name.startswith("BYPASS_")
}
"""Bypass reason as the operator reads it, in the order in which the reasons are tried."""


def new_counters(device: torch.device | str = "cpu", *leading: int) -> Tensor:
    """A zeroed counter buffer: int64 ``[*leading, 2, len(Counter)]``, row 0 prefill, row 1 decode.

    ``leading`` is nothing, the number of arms, or the number of stripes and of arms: rows of a batch are spread over
    stripes, so that few of a GPU's atomic additions meet in one cell. The sum over the stripes is what was counted.
    """
    return torch.zeros(*leading, len(PHASE_ROWS), len(Counter), dtype=torch.int64, device=device)


def read_counters(counters: Tensor) -> dict[Phase, dict[Counter, int]]:
    """Copy a counter buffer to the host (this waits for the device)."""
    rows = counters.tolist()
    return {phase: dict(zip(Counter, row, strict=True)) for phase, row in zip(PHASE_ROWS, rows, strict=True)}
