"""Attaches the policy to an engine: synthetic rows go through vLLM's own top-k stage, with the wraps around it."""

from __future__ import annotations

from itertools import repeat
from typing import Any

from torch import Tensor
from vllm.model_executor.layers import sparse_attn_indexer

from kvplugin.remap.call import NO_CONTEXT_PARALLEL
from kvplugin.vllm.gpu import wrap_decode_topk
from kvplugin.vllm.gpu.engine import GpuEngine
from kvplugin.vllm.gpu.row_buffers import BatchRows
from kvplugin.vllm.gpu.step import GpuStep, forced_step
from kvplugin.vllm.rows import Rows


def attach_hook(engine: GpuEngine, vllm_config: Any) -> None:
    """Build the engine's hook and prove that it fires in decode; every builder calls, the first one counts."""
    width: int = vllm_config.model_config.hf_text_config.index_topk
    backend: str = vllm_config.kernel_config.sparse_indexer_topk_backend
    buffer = engine.buffer()

    def topk(scores: Tensor, row_lengths: Tensor, selection: Tensor) -> None:
        _run(wrap_decode_topk.original(backend), scores, row_lengths, selection)

    def select_rows(scores: Tensor, row_lengths: Tensor, selection: Tensor, facts: Rows) -> None:
        rows = BatchRows(facts, row_lengths)
        # The test goes by what is counted, and every rank makes it for itself.
        step = GpuStep(
            engine,
            rows,
            None,
            sharded=False,
            speaks=True,
            ranks=NO_CONTEXT_PARALLEL,
            gathers_prefill=False,
            leaders=repeat(-1),
        )
        view = buffer[: len(selection), :width]
        view.fill_(-1)
        with forced_step(step):
            # As vLLM's indexer looks it up, so that a wrap that is not in place is noticed.
            _run(sparse_attn_indexer.get_indexer_topk(backend), scores, row_lengths, view)
        selection.copy_(view)

    engine.state.attach(buffer.device, width, select_rows, topk, obstacle=engine.obstacle())


def _run(topk: Any, scores: Tensor, row_lengths: Tensor, selection: Tensor) -> None:
    topk(scores, row_lengths.unsqueeze(1), 1, selection, selection.shape[1], scores.shape[1])
