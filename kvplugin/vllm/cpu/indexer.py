"""The sparse indexer on a CPU: metadata, key cache, scores, top-k, and the policy's hook around the top-k."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.sparse_attn_indexer import SparseAttnIndexer
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backend import AttentionMetadataBuilder, MultipleOf
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerBackend

from kvplugin.config import Placement
from kvplugin.vllm.capture_recorder import IndexerRows
from kvplugin.vllm.cpu.index_cache import read_keys, write_keys
from kvplugin.vllm.cpu.requests import arms_and_prefixes, prompt_lengths, request_keys
from kvplugin.vllm.cpu.scoring import score_rows, topk_rows
from kvplugin.vllm.engine_state import EngineState, engine_state
from kvplugin.vllm.rows import RowBuffers, Rows

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kvplugin.vllm.capture import GuardedRecorder

SCORES_AT_ONCE = 4 << 20
"""Scores per top-k call (16 MiB of float32): decode batches fit one call, long prefills are cut by rows."""


@dataclass(frozen=True)
class RequestRows:
    """Rows ``[start, stop)`` of the batch: consecutive queries of one request; the last one sees ``length`` tokens."""

    request: int
    start: int
    stop: int
    length: int


@dataclass(frozen=True)
class CpuIndexerMetadata:
    """One step of the indexer: the rows, grouped into top-k calls."""

    num_tokens: int
    slot_mapping: Tensor
    block_table: Tensor
    row_lengths: Tensor
    rows: Rows
    calls: tuple[tuple[RequestRows, ...], ...]
    recorder: GuardedRecorder | None = None


class CpuIndexerMetadataBuilder(AttentionMetadataBuilder[CpuIndexerMetadata]):
    """Builds :class:`CpuIndexerMetadata`; runs once per step, so it is also where a recorded mismatch is raised."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._engine = engine_state(vllm_config)
        self._buffers = RowBuffers(vllm_config.scheduler_config.max_num_batched_tokens, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CpuIndexerMetadata:
        """The step's rows.

        Raises:
            CoordinateError: an earlier step met a bad index and ``coordinate_mismatch`` is ``raise``.
        """
        if self._engine.hook is not None:
            self._engine.hook.raise_recorded()
        common = common_attn_metadata
        starts = common.query_start_loc_cpu[: common.num_reqs + 1].long()
        query_lengths = starts.diff()
        lengths = common.seq_lens[: common.num_reqs].long()
        request = torch.repeat_interleave(query_lengths)
        position = torch.arange(len(request)) - (starts[1:] - lengths)[request]
        phase = (position >= prompt_lengths(common)[request]).to(torch.int8)
        return CpuIndexerMetadata(
            num_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            row_lengths=(position + 1).int(),
            rows=self._rows(common, request, phase),
            calls=tuple(_cut(starts.tolist(), lengths.tolist())),
            recorder=self._engine.recorder(common),
        )

    def _rows(self, common: CommonAttentionMetadata, request: Tensor, phase: Tensor) -> Rows:
        arms, prefixes = arms_and_prefixes(common) or (None, None)
        stable = prefixes if prefixes is not None and prefixes.any() else None
        return self._buffers.fill(phase, request, request_keys(common), arms, stable)


def _cut(starts: list[int], lengths: list[int]) -> list[tuple[RequestRows, ...]]:
    """Group the batch's rows into top-k calls of at most ``SCORES_AT_ONCE`` scores (but at least one row)."""
    calls: list[tuple[RequestRows, ...]] = []
    current: list[RequestRows] = []
    rows, width = 0, 0
    for request, length in enumerate(lengths):
        start, end = starts[request], starts[request + 1]
        while start < end:
            wider = max(width, length)
            room = SCORES_AT_ONCE // wider - rows
            if room <= 0 and current:
                calls.append(tuple(current))
                current, rows, width = [], 0, 0
                continue
            stop = min(end, start + max(1, room))
            current.append(RequestRows(request, start, stop, length - (end - stop)))
            rows, width, start = rows + stop - start, wider, stop
    return [*calls, tuple(current)] if current else calls


class CpuIndexerBackend(DeepseekV32IndexerBackend):
    """vLLM's indexer backend with a builder that needs no GPU kernels."""

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's logs."""
        return "KVPLUGIN_CPU_INDEXER"

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any block size."""
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[CpuIndexerMetadataBuilder]:
        """The CPU builder."""
        return CpuIndexerMetadataBuilder


class CpuSparseAttnIndexer(SparseAttnIndexer):
    """vLLM's sparse indexer op for CPUs, any ``index_topk``; registered out of tree in its place."""

    def __init__(self, k_cache: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(k_cache, *args, **kwargs)
        # The cache layer names its backend itself; only the instances handed to this op are redirected.
        k_cache.get_attn_backend = lambda: CpuIndexerBackend
        self._engine: EngineState = engine_state(get_current_vllm_config())
        self._scores = torch.empty(0)
        self._leader = -1  # while the self-test is under way
        self._leader = self._engine.attach(
            self.topk_indices_buffer.device,
            self.topk_tokens,
            self.select_rows,
            topk_rows,
        )
        # Every rank scores every row here: one rank's counters are the group's.
        if get_tensor_model_parallel_rank() == 0:
            self._engine.export()

    def forward_cpu(self, hidden_states: Tensor, q_quant: Tensor, k: Tensor | None, weights: Tensor) -> Tensor:
        """Insert keys, score all visible tokens, and write the selection into the shared top-k buffer."""
        buffer: Tensor = self.topk_indices_buffer
        metadata = get_forward_context().attn_metadata
        if not isinstance(metadata, dict):  # profiling: nothing to score
            return buffer
        step: CpuIndexerMetadata = metadata[self.k_cache.prefix]
        cache = self.k_cache.kv_cache
        if k is not None and not self.skip_k_cache_insert:
            write_keys(k[: step.num_tokens], cache, step.slot_mapping[: step.num_tokens], self.quant_block_size)
        buffer[: hidden_states.shape[0]] = -1
        for call in step.calls:
            self._select_call(call, step, q_quant, weights, cache)
        return buffer

    forward_native = forward_cpu

    def _select_call(
        self, call: tuple[RequestRows, ...], step: CpuIndexerMetadata, queries: Tensor, weights: Tensor, cache: Tensor
    ) -> None:
        first, last = call[0].start, call[-1].stop
        scores = self._score_buffer(last - first, max(part.length for part in call))
        for part in call:
            keys = read_keys(cache, step.block_table[part.request], part.length, self.head_dim, self.quant_block_size)
            rows = slice(part.start, part.stop)
            score_rows(queries[rows], weights[rows], keys, scores[part.start - first : part.stop - first])
        rows = slice(first, last)
        selection = self.topk_indices_buffer[rows, : self.topk_tokens]
        kept = None if step.recorder is None else step.recorder.within(rows)
        if step.recorder is None or kept is None:
            self.select_rows(scores, step.row_lengths[rows], selection, step.rows.at(rows))
            return
        target, in_call = step.recorder.target, slice(kept.start - first, kept.stop - first)
        learned, own = torch.empty_like(selection), scores[in_call, : target.length].clone()
        self.select_rows(scores, step.row_lengths[rows], selection, step.rows.at(rows), learned)
        keys = read_keys(cache, step.block_table[target.place], target.length, self.head_dim, self.quant_block_size)
        seen = IndexerRows(queries[kept].clone(), weights[kept].clone(), own, learned[in_call])
        step.recorder.indexer(extract_layer_index(self.k_cache.prefix), seen, keys)

    def select_rows(
        self,
        scores: Tensor,
        row_lengths: Tensor,
        selection: Tensor,
        facts: Rows,
        learned: Tensor | None = None,
    ) -> None:
        """The top-k stage: the kernel, with the policy's hook before or after it.

        Args:
            scores: float32 ``[T, N]``, token ``i`` at column ``i``.
            row_lengths: int32 ``[T]``.
            selection: int32 ``[T, K]``, written.
            facts: of the rows.
            learned: int32 ``[T, K]``, written if given: the top-k that the policy was handed, or would have been.
        """
        hook = self._engine.hook
        if hook is not None and hook.placement is Placement.BEFORE_TOPK:
            if learned is not None:
                topk_rows(scores, row_lengths, learned)
            hook.on_topk(scores, None, row_lengths, selection, facts, leader=self._leader)
            topk_rows(scores, row_lengths, selection)
            hook.on_selected(row_lengths, selection, facts)
            return
        topk_rows(scores, row_lengths, selection)
        if learned is not None:
            learned.copy_(selection)
        if hook is not None:
            hook.on_topk(scores, None, row_lengths, selection, facts, leader=self._leader)

    def _score_buffer(self, rows: int, columns: int) -> Tensor:
        if self._scores.numel() < rows * columns:
            self._scores = torch.empty(rows * columns)
        return self._scores[: rows * columns].view(rows, columns)
