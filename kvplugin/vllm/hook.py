"""The policy of one engine at its top-k stage: one function that every engine's indexer calls."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvplugin.config import KvpluginConfig, MismatchAction, Mode, Placement
from kvplugin.topology import (
    apply_topology_policy,
    lift_structural_scores,
    lower,
    new_counters,
    raise_recorded,
)
from kvplugin.topology.reference import call_bypass

TopkFunction = Callable[[Tensor, Tensor, Tensor], None]
"""``topk(scores [T, N], row_lengths [T], selection [T, K])``: the engine's own top-k, writing ``selection``."""


class PolicyHook:
    """Applies the configured policy to the rows of one top-k call and counts what it did.

    Attributes:
        placement: call :meth:`on_topk` after the engine's top-k, or before it.
        counters: int64 ``[2, len(Counter)]`` on the engine's device, added to by every call; exact.
        sampled: the same from the sampled rows of ``before_topk``, where the exact counters stay 0.
    """

    def __init__(self, config: KvpluginConfig, width: int, device: torch.device, topk: TopkFunction) -> None:
        """Lower the policy for the engine's top-k width.

        Raises:
            ArgumentError: the policy's structure does not fit the width.
        """
        self.placement = config.placement
        self.params = lower(config.policy, width)
        self.counters = new_counters(device)
        self.sampled = new_counters(device)
        self._observe = self.params._replace(mode=Mode.OBSERVE)
        self._topk = topk
        self._sample_every = _coprime(config.metrics.sample_every)
        self._rows = 0
        raises = self.params.mismatch is MismatchAction.RAISE
        self._error = torch.zeros(4, dtype=torch.int64, device=device) if raises else None

    def on_topk(
        self,
        scores: Tensor,
        score_start: Tensor | None,
        row_lengths: Tensor,
        selection: Tensor,
        row_live: Tensor | None,
        row_phase: Tensor | None,
    ) -> None:
        """Rewrite ``selection`` after the top-k, or lift ``scores`` before it; on the current stream, no host sync.

        Args:
            scores: float32, bfloat16 or float16 ``[T, N]``; token ``i`` of row ``t`` at column ``score_start[t] + i``.
            score_start: int32 or int64 ``[T]``, or None for 0.
            row_lengths: int32 or int64 ``[T]``, the top-k kernel's own row ends.
            selection: int32 ``[T, K]``, a view of the engine's top-k buffer.
            row_live: bool ``[T]``, or None where every row is live.
            row_phase: int8 ``[T]`` (0 prefill, 1 decode), or None for decode.
        """
        if self.placement is Placement.BEFORE_TOPK:
            self._sample(scores, score_start, row_lengths, selection, row_live, row_phase)
            lift_structural_scores(
                scores,
                row_lengths,
                config=self.params,
                width=selection.shape[1],
                row_live=row_live,
                row_phase=row_phase,
                score_start=score_start,
            )
            return
        apply_topology_policy(
            selection,
            row_lengths,
            config=self.params,
            row_live=row_live,
            row_phase=row_phase,
            scores=scores,
            score_start=score_start,
            counters=self.counters,
            error=self._error,
        )

    def reset(self) -> None:
        """Forget everything counted, sampled and recorded so far."""
        self._rows = 0
        for tensor in (self.counters, self.sampled, self._error):
            if tensor is not None:
                tensor.zero_()

    def raise_recorded(self) -> None:
        """Raise a coordinate mismatch that an earlier step recorded (``coordinate_mismatch: raise`` only).

        Raises:
            CoordinateError: naming row, value and interval.
        """
        if self._error is not None:
            raise_recorded(self._error)

    def _sample(
        self,
        scores: Tensor,
        score_start: Tensor | None,
        row_lengths: Tensor,
        selection: Tensor,
        row_live: Tensor | None,
        row_phase: Tensor | None,
    ) -> None:
        """Count what the policy changes in every n-th row, from a top-k of scores that were not lifted.

        Rows of a ragged layout are left out: the engine's top-k is asked for rows that begin at column 0.
        """
        if call_bypass(self.params, scores.shape[0]) is not None:
            # Nothing is lifted; observing the whole call counts why, and reads no row.
            apply_topology_policy(
                selection,
                row_lengths,
                config=self._observe,
                row_live=row_live,
                row_phase=row_phase,
                scores=scores,
                score_start=score_start,
                counters=self.sampled,
                error=self._error,
            )
            return
        first = -self._rows % self._sample_every
        self._rows += scores.shape[0]
        rows = slice(first, None, self._sample_every)
        if first >= scores.shape[0] or score_start is not None:
            return
        learned = torch.full_like(selection[rows], -1)
        self._topk(scores[rows], row_lengths[rows], learned)
        apply_topology_policy(
            learned,
            row_lengths[rows],
            config=self._observe,
            row_live=None if row_live is None else row_live[rows],
            row_phase=None if row_phase is None else row_phase[rows],
            scores=scores[rows],
            counters=self.sampled,
            error=self._error,
        )


def _coprime(stride: int) -> int:
    """The next stride without small factors: batches repeat in step, and it must not meet the same row each time."""
    while stride > 1 and any(stride % factor == 0 for factor in (2, 3, 5, 7)):
        stride += 1
    return stride
