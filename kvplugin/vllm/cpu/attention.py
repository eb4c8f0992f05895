"""Sparse MLA on a CPU: backend, metadata and implementation, in plain torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.attention.sparse_mla_attention import SharedTopkIndicesBuffer
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionMetadata,
    AttentionMetadataBuilder,
    MLAAttentionImpl,
    MultipleOf,
)
from vllm.v1.attention.backends.mla.sparse_utils import align_blocks_to_rows, flat_kv_row_view

from kvplugin.remap import Member
from kvplugin.remap.layer_call import LayerCall
from kvplugin.remap.memo import GroupMemo
from kvplugin.vllm.backend_names import BACKEND_NAME
from kvplugin.vllm.capture_recorder import LayerStep
from kvplugin.vllm.cpu.mla_ops import attend_rows, in_token_order, write_rows
from kvplugin.vllm.cpu.startup import KV_CACHE_DTYPES
from kvplugin.vllm.engine_remap import IndexedLayer
from kvplugin.vllm.engine_state import engine_state

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kvplugin.vllm.capture import GuardedRecorder


class CpuSparseMLABackend(AttentionBackend):
    """What ``--attention-backend KVPLUGIN`` selects on vLLM's CPU build."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = list(KV_CACHE_DTYPES)

    @staticmethod
    def get_name() -> str:
        """Name in vLLM's logs."""
        return BACKEND_NAME

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Blocks a whole number of rows apart, so that the cache is addressable as flat rows."""
        return align_blocks_to_rows(spec)

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Any block size."""
        return [MultipleOf(1)]

    @staticmethod
    def get_builder_cls() -> type[CpuSparseMLAMetadataBuilder]:
        """The metadata builder."""
        return CpuSparseMLAMetadataBuilder

    @staticmethod
    def get_impl_cls() -> type[CpuSparseMLAImpl]:
        """The implementation."""
        return CpuSparseMLAImpl

    @classmethod
    def is_mla(cls) -> bool:
        """MLA only."""
        return True

    @classmethod
    def is_sparse(cls) -> bool:
        """Sparse only."""
        return True


@dataclass(frozen=True)
class CpuSparseMLAMetadata(AttentionMetadata):
    """One step. Every token is a decode token to vLLM's MLA layer: all attend through the top-k selection.

    ``memo`` keeps the physical indices that an index group shares, in the step that it calls ``memo_step``.
    ``recorder`` is there in the one step that a capture waits for.
    """

    num_actual_tokens: int
    slot_mapping: Tensor
    block_table: Tensor
    row_request: Tensor
    block_size: int
    num_decodes: int
    num_decode_tokens: int
    memo: GroupMemo
    memo_step: int
    recorder: GuardedRecorder | None = None
    num_prefills: int = 0


class CpuSparseMLAMetadataBuilder(AttentionMetadataBuilder[CpuSparseMLAMetadata]):
    """Builds :class:`CpuSparseMLAMetadata`."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.NEVER

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._engine = engine_state(vllm_config)
        self._engine.remap.expect_layers()
        self._bound = False

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> CpuSparseMLAMetadata:
        """The step's rows and their requests. Leaders and followers have builders of their own, for one batch."""
        common = common_attn_metadata
        if not self._bound:
            self._bind_layers(common.block_table_tensor)
        memo = self._engine.remap.memo(in_token_order)
        query_lengths = common.query_start_loc_cpu[: common.num_reqs + 1].diff().long()
        return CpuSparseMLAMetadata(
            num_actual_tokens=common.num_actual_tokens,
            slot_mapping=common.slot_mapping,
            block_table=common.block_table_tensor,
            row_request=torch.repeat_interleave(query_lengths),
            block_size=self.kv_cache_spec.block_size,
            num_decodes=common.num_reqs,
            num_decode_tokens=common.num_actual_tokens,
            memo=memo,
            memo_step=memo.begin_step(common.query_start_loc),
            recorder=self._engine.recorder(common),
        )

    def _bind_layers(self, block_table: Tensor) -> None:
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.layer_names:
            layers[name].impl.bind(name, self.kv_cache_spec.block_size, table=block_table.data_ptr())
        self._bound = True


class CpuSparseMLAImpl(IndexedLayer, SharedTopkIndicesBuffer, MLAAttentionImpl[CpuSparseMLAMetadata]):
    """Attends to the rows of the latent cache that the shared top-k buffer names, converted once per index group."""

    is_sparse = True
    supports_dense_mha_prefill = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        alibi_slopes: list[float] | None,
        sliding_window: int | None,
        kv_cache_dtype: str,
        logits_soft_cap: float | None,
        attn_type: str,
        kv_sharing_target_layer_name: str | None,
        *,
        kv_lora_rank: int,
        indexer: object | None = None,
        topk_indices_buffer: Tensor | None = None,
        **unused: Any,
    ) -> None:
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_kv_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_lora_rank = kv_lora_rank
        self.runs_indexer = indexer is not None
        self._engine = engine_state(get_current_vllm_config())
        self._written: Tensor | None = None  # by the layer's captured step, until it has attended
        self.init_topk_indices_buffer(indexer, topk_indices_buffer)

    def record_logical_topk_ready(self) -> None:
        """Nothing to record: the CPU runs indexer and attention in order."""

    def do_kv_cache_update(
        self,
        kv_c_normed: Tensor,
        k_pe: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        kv_cache_dtype: str,
        k_scale: Tensor,
    ) -> None:
        """Write ``[latent | rope]`` of each token (``[T, C]`` and ``[T, 1, R]``) into the paged cache."""
        if kv_cache.numel() == 0:  # profiling, before the cache exists
            return
        block_size = kv_cache.shape[1]
        rows, stride_rows = flat_kv_row_view(kv_cache, block_size)
        values = torch.cat([kv_c_normed, k_pe.flatten(1)], dim=-1)
        write_rows(values, rows, slot_mapping.flatten(), block_size, stride_rows)
        if self._engine.capture is not None:
            self._written = values

    def forward_mqa(
        self,
        q: Tensor | tuple[Tensor, Tensor],
        kv_c_and_k_pe_cache: Tensor,
        attn_metadata: CpuSparseMLAMetadata,
        layer: Any,
    ) -> tuple[Tensor, None]:
        """Attention of ``q`` (``[T, H, C + R]``) over each row's selection: ``[T, H, C]``."""
        query = torch.cat(q, dim=-1) if isinstance(q, tuple) else q
        buffer = self.topk_indices_buffer
        assert buffer is not None  # vLLM hands every sparse layer the shared buffer
        step, count = attn_metadata, query.shape[0]
        rows, stride_rows = flat_kv_row_view(kv_c_and_k_pe_cache, step.block_size)
        physical = step.memo.convert(
            LayerCall(
                step.memo_step,
                self.layer,
                Member(stride_rows),
                buffer[:count],
                step.row_request[:count],
                step.block_table,
                block_size=step.block_size,
                num_blocks=kv_c_and_k_pe_cache.shape[0],
            )
        )
        recorder = step.recorder
        lse = None if recorder is None else query.new_empty(query.shape[:2], dtype=torch.float32)
        out = attend_rows(query, rows, physical, self.scale, self.kv_lora_rank, lse)
        if recorder is not None and lse is not None:
            recorder.attention(
                LayerStep(
                    self.layer,
                    query,
                    self._written,
                    kv_c_and_k_pe_cache,
                    step.block_table,
                    buffer[:count],
                    physical,
                    stride_rows,
                    out,
                    lse,
                    self.scale,
                )
            )
        self._written = None
        return out, None
