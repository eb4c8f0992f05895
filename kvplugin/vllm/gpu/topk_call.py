"""The policy around one top-k call of vLLM's sparse indexer: a prefill chunk, or the decode rows of a batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from kvplugin.config import Placement
from kvplugin.remap.call import ContextParallel
from kvplugin.vllm.gpu.row_buffers import BatchRows
from kvplugin.vllm.gpu.step import GpuStep
from kvplugin.vllm.hook import PolicyHook

T = TypeVar("T")


class TopkCall(NamedTuple):
    """One call. Its scores are large and used again for the next chunk: nothing here outlives the call.

    Attributes:
        row_lengths: int32 ``[T]``, as the kernel bounds its rows.
        score_start: int32 ``[T]``, column of each row's token 0; None = 0.
        ranks: how the scores of a row are dealt out over ranks; None where this rank has all of them.
        counted: this rank's counters are to hold these rows.
        leader: ordinal of the indexer, where it is known.
    """

    hook: PolicyHook
    scores: Tensor
    score_start: Tensor | None
    row_lengths: Tensor
    selection: Tensor
    rows: BatchRows
    ranks: ContextParallel | None
    counted: bool
    leader: int = -1

    def around(self, topk: Callable[[], T]) -> T:
        """Run the engine's top-k with the policy before or after it, on the current stream."""
        if self.ranks is not None:
            self.hook.lift_shared(self.scores, self.score_start, self.rows.lengths, self.rows.facts, self.ranks)
            return topk()
        if self.hook.placement is Placement.BEFORE_TOPK:
            self._on_topk()
            result = topk()
            if self.counted:
                self.hook.on_selected(self.row_lengths, self.selection, self.rows.facts)
            return result
        result = topk()
        self._on_topk()
        return result

    def _on_topk(self) -> None:
        self.hook.on_topk(
            self.scores,
            self.score_start,
            self.row_lengths,
            self.selection,
            self.rows.facts,
            counted=self.counted,
            leader=self.leader,
        )


def prefill_call(
    step: GpuStep, scores: Tensor, row_starts: Tensor, row_ends: Tensor, selection: Tensor
) -> TopkCall | None:
    """A prefill chunk: ``selection`` is a slice of the shared buffer, whose place tells which rows these are."""
    hook = step.engine.state.hook
    if hook is None:
        return None
    first = selection.storage_offset() // selection.stride(0)
    rows = slice(first, first + len(selection))
    return TopkCall(
        hook,
        scores,
        row_starts,
        row_ends - row_starts,
        selection,
        step.batch.at(rows),
        step.ranks if step.ranks.size > 1 and not step.gathers_prefill else None,
        counted=step.sharded or step.speaks,
    )


def decode_call(step: GpuStep, scores: Tensor, lengths: Tensor, queries: int, selection: Tensor) -> TopkCall | None:
    """The decode rows: the first rows of the buffer, or as many as the padded layout has."""
    hook = step.engine.state.hook
    if hook is None:
        return None
    rows = (step.batch if step.padded is None else step.padded).at(slice(0, len(selection)))
    return TopkCall(
        hook,
        scores,
        None,
        row_ends(lengths, queries, len(selection)),
        selection,
        rows,
        step.ranks if step.ranks.size > 1 else None,
        counted=step.speaks,
        leader=next(step.leaders),
    )


def row_ends(lengths: Tensor, queries: int, rows: int) -> Tensor:
    """Length of each decode row, int32 ``[rows]``, as vLLM's kernels read ``lengths``.

    Args:
        lengths: int32 ``[B, queries]`` or ``[rows, 1]``, one a row; or ``[B, 1]``, of each request's last query.
    """
    if lengths.numel() == rows:
        return lengths.reshape(-1)
    offsets = torch.arange(1 - queries, 1, dtype=torch.int32, device=lengths.device)
    return (lengths.reshape(-1, 1) + offsets).clamp_(min=0).reshape(-1)
