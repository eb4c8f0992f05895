"""One checked call of the signals."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class SignalCall(NamedTuple):
    """Arguments of one ``observe_into`` call; shapes, dtypes and devices can be trusted, values can not.

    Attributes:
        learned: int32 or int64 ``[T, K]``, logical indices that the indexer's top-k returned; any strides.
        row_lengths: int32 or int64 ``[T]``.
        row_live: bool ``[T]`` or None (all live).
        row_phase: int8 ``[T]`` (0 prefill, 1 decode) or None (all decode); other values count as decode.
        row_arm: int32 ``[T]`` or None (all 0); rows of an unknown arm are left out.
        row_request: int32 ``[T]``, a stable key of each row's request, or None (all 0).
        scores: float32, bfloat16 or float16 ``[T, N]`` or None; ``scores[t, score_start[t] + token]``.
        score_start: int32 or int64 ``[T]`` or None (all 0).
        policies, enabled: of a :class:`kvplugin.topology.table.PolicyTable`.
        every: one of so many bursts of rows is sampled.
        counters: int64 ``[arms, 2, len(SignalColumn)]``, contiguous, added to.
        tokens, tags: of a :class:`kvplugin.topology.signals.memory.SignalMemory`, or None without overlaps.
        leader: layer of the memory that these rows belong to; 0 without one.
    """

    learned: Tensor
    row_lengths: Tensor
    row_live: Tensor | None
    row_phase: Tensor | None
    row_arm: Tensor | None
    row_request: Tensor | None
    scores: Tensor | None
    score_start: Tensor | None
    policies: Tensor
    enabled: Tensor
    every: int
    counters: Tensor
    tokens: Tensor | None
    tags: Tensor | None
    leader: int
