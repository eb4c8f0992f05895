"""Wraps the indexer's metadata builder, which runs once per step and batch: it renews what is known of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from itertools import cycle
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadataBuilder

from kvplugin.remap.call import ContextParallel
from kvplugin.vllm.gpu.engine import GpuEngine, gpu_engine
from kvplugin.vllm.gpu.row_buffers import BatchRows, RowBuffers
from kvplugin.vllm.gpu.step import ATTRIBUTE, GpuStep, attach_step
from kvplugin.vllm.startup import has_sparse_attention

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

original_build = DeepseekV32IndexerMetadataBuilder.build
original_update = vars(DeepseekV32IndexerMetadataBuilder).get("update_draft_decode_metadata")
"""None in 0.30 and 0.31, where a draft builds anew for each of its steps."""

STATE = "kvplugin_rows"
"""Attribute of a builder: micro-batches and drafts have builders of their own, and their rows memory of its own."""


class _BuilderState(NamedTuple):
    engine: GpuEngine
    ranks: ContextParallel
    side_by_side: RowBuffers
    padded: RowBuffers
    leaders: Sequence[int]


@wraps(original_build)
def build(
    self: Any, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
) -> Any:
    """As vLLM's; then describe the rows.

    Raises:
        CoordinateError: an earlier step met a bad index and ``coordinate_mismatch`` is ``raise``.
    """
    metadata = original_build(self, common_prefix_len, common_attn_metadata, fast_build)
    state = _state(self)
    if state is not None and state.engine.state.hook is not None and common_attn_metadata.num_actual_tokens:
        state.engine.state.hook.raise_recorded()
        attach_step(metadata, self.layer_names[0], _describe(self, state, metadata, common_attn_metadata))
    return metadata


def update_draft_decode_metadata(self: Any, metadata: Any) -> None:
    """As vLLM's, for a draft step that only moves on: one row for each request. Runs inside captured graphs."""
    if original_update is not None:
        original_update(self, metadata)
    state: _BuilderState | None = getattr(self, STATE, None)
    if state is not None and getattr(metadata, ATTRIBUTE, None) is not None:
        state.side_by_side.fill_one_each(metadata.seq_lens, state.engine.memory(self.device).columns)


def _state(builder: Any) -> _BuilderState | None:
    """The builder's own part, made at its first batch; None where the model brings an indexer of its own."""
    if not has_sparse_attention(builder.vllm_config) or builder.compress_ratio != 1:
        return None
    found: _BuilderState | None = getattr(builder, STATE, None)
    if found is None:
        engine = gpu_engine(builder.vllm_config)
        rows, device, arms = engine.most_rows, builder.device, engine.has_arms
        found = _BuilderState(
            engine,
            engine.context_ranks(),
            RowBuffers(rows, device, prefixes=arms),
            RowBuffers(rows, device, prefixes=arms),
            range(len(builder.layer_names)) if engine.is_target(builder.layer_names[0]) else [-1],
        )
        setattr(builder, STATE, found)
    return found


def _describe(builder: Any, state: _BuilderState, metadata: Any, common: CommonAttentionMetadata) -> GpuStep:
    columns = state.engine.source.renew(common, state.engine.memory(builder.device))
    starts, lengths = common.query_start_loc[: common.num_reqs + 1], common.seq_lens[: common.num_reqs]
    state.side_by_side.fill(starts, lengths, columns)
    prefill = metadata.prefill
    return GpuStep(
        state.engine,
        state.side_by_side.first(state.engine.most_rows),
        _padded(state, metadata, common, columns),
        sharded=getattr(prefill, "row_shard_sizes", None) is not None,
        speaks=state.engine.speaks,
        ranks=state.ranks,
        gathers_prefill=state.engine.gathers_prefill,
        leaders=cycle(state.leaders),
    )


def _padded(state: _BuilderState, metadata: Any, common: CommonAttentionMetadata, columns: Any) -> BatchRows | None:
    """The decode rows as the indexer pads them where requests differ in their number of queries; else None."""
    decode, requests = metadata.decode, metadata.num_decodes
    if decode is None:
        return None
    rows = len(decode.decode_lens)
    if not decode.requires_padding and metadata.num_decode_tokens % rows == 0:
        return None
    queries = common.query_start_loc_cpu[: requests + 1]
    slots = int((queries[1:] - queries[:-1]).max())
    starts, lengths = common.query_start_loc[: requests + 1], common.seq_lens[:requests]
    state.padded.fill(starts, lengths, columns, slots=slots)
    return state.padded.first(requests * slots)


def install() -> None:
    """Put the wraps in place. Idempotent."""
    DeepseekV32IndexerMetadataBuilder.build = build
    if original_update is not None:
        wrapped = wraps(original_update)(update_draft_decode_metadata)
        DeepseekV32IndexerMetadataBuilder.update_draft_decode_metadata = wrapped


def uninstall() -> None:
    """Put vLLM's own methods back."""
    DeepseekV32IndexerMetadataBuilder.build = original_build
    if original_update is not None:
        DeepseekV32IndexerMetadataBuilder.update_draft_decode_metadata = original_update
