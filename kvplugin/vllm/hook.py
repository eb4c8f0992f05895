"""The policies of one engine at its top-k stage: one function that every engine's indexer calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kvplugin.config import MismatchAction, Mode, Placement, PolicyConfig
from kvplugin.remap.call import NO_CONTEXT_PARALLEL, ContextParallel
from kvplugin.topology import (
    PolicyParams,
    PolicyTable,
    apply_topology_policy,
    lift_structural_scores,
    lower,
    new_counters,
    raise_recorded,
)
from kvplugin.topology.prefix import count_stable_prefix, new_prefix_counters
from kvplugin.topology.reference import call_bypass
from kvplugin.topology.signals import SignalMemory, new_signal_counters, observe_signals
from kvplugin.vllm.rows import Rows

TopkFunction = Callable[[Tensor, Tensor, Tensor], None]
"""``topk(scores [T, N], row_lengths [T], selection [T, K])``: the engine's own top-k, writing ``selection``."""


REMEMBERED_REQUESTS = 32
"""Requests whose last selections an indexer remembers, in memory of its own; later ones take their places."""


class PolicyHook:
    """Applies each row's policy to the rows of one top-k call and counts what it did.

    Args:
        policies: of each arm, None for a free row of the table; one policy where the engine has no arms.
        placement: whether :meth:`on_topk` is called after the engine's top-k, or before it.
        sample_every: ``before_topk`` counts in one row of so many.
        signals_every: one row of so many is looked at for signals; 0 = none.
        leaders: indexers of the engine, at most.
        width: K of the engine's top-k.
        device: of its buffers.
        topk: its top-k alone.

    Attributes:
        counters: int64 ``[arms, 2, len(Counter)]`` on the engine's device, added to by every call; exact.
        sampled: the same from the sampled rows of ``before_topk``, where the exact counters stay 0.
        prefix_counters: int64 ``[arms, 2, len(PrefixCounter)]``, of modes that count stable prefixes.
        signals: int64 ``[arms, 2, len(SignalColumn)]``, histograms of the indexer's health from sampled rows.
        signals_every: one row of so many is looked at for them; 0 = none.

    Raises:
        ArgumentError: a policy's structure does not fit the width.
    """

    def __init__(
        self,
        policies: Sequence[PolicyConfig | None],
        placement: Placement,
        sample_every: int,
        width: int,
        device: torch.device,
        topk: TopkFunction,
        *,
        signals_every: int = 0,
        leaders: int = 0,
    ) -> None:
        self.placement, self.width = placement, width
        arms = len(policies)
        lowered = self._lowered(policies)
        self._table = PolicyTable(lowered, device)
        self._observed = PolicyTable([_observing(params) for params in lowered], device)
        self.counters, self.sampled = new_counters(device, arms), new_counters(device, arms)
        self.prefix_counters = new_prefix_counters(device, arms)
        self.signals = new_signal_counters(device, arms)
        self.signals_every = signals_every
        self._memory = SignalMemory(leaders, REMEMBERED_REQUESTS, width, device) if leaders else None
        self._uncounted = new_counters(device, arms)
        self._counting = torch.zeros(arms, dtype=torch.int32, device=device)
        self._topk = topk
        self._sample_every = _coprime(sample_every)
        self._rows = 0
        self._error = torch.zeros(4, dtype=torch.int64, device=device)
        self._note(lowered)

    @property
    def acting(self) -> dict[int, PolicyParams]:
        """The policies that do something, by their row of the table."""
        return {arm: params for arm, params in enumerate(self._policies) if params.mode is not Mode.DISABLED}

    def set_policies(self, policies: Sequence[PolicyConfig | None], *, enabled: bool) -> None:
        """Put other policies in the table, and pull or release the switch; not while a step is under way.

        With the switch pulled every row is left as it is, and nothing is counted.

        Raises:
            ArgumentError: a policy does not fit the width, or the table.
        """
        lowered = self._lowered(policies)
        self._table.check(lowered)
        for arm, params in enumerate(lowered):
            self._table.set_arm(arm, params)
            self._observed.set_arm(arm, _observing(params))
        self._note(lowered if enabled else self._lowered([None] * len(lowered)))
        for table in (self._table, self._observed):
            table.switch(on=enabled)
        self._error.zero_()

    def on_topk(
        self,
        scores: Tensor,
        score_start: Tensor | None,
        row_lengths: Tensor,
        selection: Tensor,
        rows: Rows,
        *,
        counted: bool = True,
        leader: int = -1,
    ) -> None:
        """Rewrite ``selection`` after the top-k, or lift ``scores`` before it; on the current stream, no host sync.

        Args:
            scores: float32, bfloat16 or float16 ``[T, N]``; token ``i`` of row ``t`` at column ``score_start[t] + i``.
            score_start: int32 or int64 ``[T]``, or None for 0.
            row_lengths: int32 or int64 ``[T]``, the top-k kernel's own row ends.
            selection: int32 ``[T, K]``, a view of the engine's top-k buffer.
            rows: what else is known of the rows.
            counted: False where another rank counts the same rows.
            leader: ordinal of the indexer among the engine's; -1 = unknown, its selections are compared with no others.
        """
        if self.placement is Placement.BEFORE_TOPK:
            if counted:
                self._sample(scores, score_start, row_lengths, selection, rows)
            self._lift(scores, score_start, row_lengths, selection.shape[1], rows, NO_CONTEXT_PARALLEL)
            return
        if counted:
            self._look(self.signals_every, scores, score_start, row_lengths, selection, rows, leader)
        counters = self.counters if counted else self._uncounted
        self._apply(self._table, selection, row_lengths, scores, score_start, rows, counters)
        if counted:
            self.on_selected(row_lengths, selection, rows)

    def lift_shared(
        self, scores: Tensor, score_start: Tensor | None, row_lengths: Tensor, rows: Rows, ranks: ContextParallel
    ) -> None:
        """``before_topk`` where a row's scores are dealt out over context-parallel ranks: lift what this one has.

        Nothing is counted: no rank sees a row's whole selection with its scores.

        Args:
            scores, score_start: of this rank's tokens, side by side.
            row_lengths: int32 or int64 ``[T]``, of whole rows, the same on all ranks.
            rows: what else is known of the rows.
            ranks: who has which token.
        """
        self._lift(scores, score_start, row_lengths, self.width, rows, ranks)

    def on_selected(self, row_lengths: Tensor, selection: Tensor, rows: Rows) -> None:
        """Count stable prefixes in rows whose selection is settled; for engines that call :meth:`on_topk` before it."""
        if rows.prefix is not None:
            count_stable_prefix(
                selection,
                row_lengths,
                rows.prefix,
                counting=self._counting,
                counters=self.prefix_counters,
                row_live=rows.live,
                row_phase=rows.phase,
                row_arm=rows.arm,
            )

    def reset(self) -> None:
        """Forget everything counted, sampled and recorded so far."""
        self._rows = 0
        for tensor in (self.counters, self.sampled, self.prefix_counters, self.signals, self._error):
            tensor.zero_()
        if self._memory is not None:
            self._memory.clear()

    def raise_recorded(self) -> None:
        """Raise a coordinate mismatch that an earlier step recorded (``coordinate_mismatch: raise`` only).

        Raises:
            CoordinateError: naming row, value and interval.
        """
        if self._raises:
            raise_recorded(self._error)

    def _lowered(self, policies: Sequence[PolicyConfig | None]) -> list[PolicyParams]:
        return [lower(policy or PolicyConfig(), self.width) for policy in policies]

    def _note(self, policies: list[PolicyParams]) -> None:
        """What the host must know of the policies that rows follow now."""
        self._policies = policies
        self._raises = any(params.mismatch is MismatchAction.RAISE for params in self.acting.values())
        counting = [params.mode is Mode.COMPRESS_SPARSE for params in policies]
        self._counting.copy_(torch.tensor(counting, dtype=torch.int32))

    def _lift(
        self,
        scores: Tensor,
        score_start: Tensor | None,
        row_lengths: Tensor,
        width: int,
        rows: Rows,
        ranks: ContextParallel,
    ) -> None:
        lift_structural_scores(
            scores,
            row_lengths,
            config=self._table,
            width=width,
            row_live=rows.live,
            row_phase=rows.phase,
            row_arm=rows.arm,
            score_start=score_start,
            ranks=ranks.size,
            rank=ranks.rank,
            interleave=ranks.interleave,
        )

    def _apply(
        self,
        table: PolicyTable,
        selection: Tensor,
        row_lengths: Tensor,
        scores: Tensor,
        score_start: Tensor | None,
        rows: Rows,
        counters: Tensor,
    ) -> None:
        apply_topology_policy(
            selection,
            row_lengths,
            config=table,
            row_live=rows.live,
            row_phase=rows.phase,
            row_arm=rows.arm,
            scores=scores,
            score_start=score_start,
            counters=counters,
            error=self._error,
        )

    def _look(
        self,
        every: int,
        scores: Tensor,
        score_start: Tensor | None,
        row_lengths: Tensor,
        learned: Tensor,
        rows: Rows,
        leader: int,
    ) -> None:
        """Look at what the indexer learned for signals of its health, in one row of ``every``.

        Which arms act is left to the device: a graph may be captured while none does.
        """
        if every:
            observe_signals(
                learned,
                row_lengths,
                config=self._table,
                counters=self.signals,
                every=every,
                scores=scores,
                score_start=score_start,
                row_live=rows.live,
                row_phase=rows.phase,
                row_arm=rows.arm,
                row_request=rows.request,
                memory=self._memory,
                leader=leader,
            )

    def _sample(
        self, scores: Tensor, score_start: Tensor | None, row_lengths: Tensor, selection: Tensor, rows: Rows
    ) -> None:
        """Count what the policy changes in every n-th row, from a top-k of scores that were not lifted.

        Rows of a ragged layout are left out: the engine's top-k is asked for rows that begin at column 0.
        """
        # Arms that lift have the same limits, which was checked where they were put in force.
        if any(call_bypass(params, scores.shape[0]) is not None for params in self.acting.values()):
            # Nothing is lifted; observing the whole call counts why, and reads no row.
            self._apply(self._observed, selection, row_lengths, scores, score_start, rows, self.sampled)
            return
        first = -self._rows % self._sample_every
        self._rows += scores.shape[0]
        if first >= scores.shape[0] or score_start is not None:
            return
        chosen = slice(first, None, self._sample_every)
        learned = torch.full_like(selection[chosen], -1)
        part, lengths, facts = scores[chosen], row_lengths[chosen], rows.at(chosen)
        self._topk(part, lengths, learned)
        # Each of these few rows gives its signals; two of one request are hardly ever a step apart.
        self._look(min(1, self.signals_every), part, None, lengths, learned, facts, -1)
        self._apply(self._observed, learned, lengths, part, None, facts, self.sampled)


def _observing(params: PolicyParams) -> PolicyParams:
    return params if params.mode is Mode.DISABLED else params._replace(mode=Mode.OBSERVE)


def _coprime(stride: int) -> int:
    """The next stride without small factors: batches repeat in step, and it must not meet the same row each time."""
    while stride > 1 and any(stride % factor == 0 for factor in (2, 3, 5, 7)):
        stride += 1
    return stride
