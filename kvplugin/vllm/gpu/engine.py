"""What the plugin's parts on a GPU share: one object for each engine in each worker process."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index

from kvplugin.config import Placement
from kvplugin.metrics.definitions import InactiveReason
from kvplugin.remap.call import ContextParallel
from kvplugin.vllm.engine_state import EngineState, engine_state
from kvplugin.vllm.gpu.conversions import SharedConversions
from kvplugin.vllm.gpu.request_columns import RequestMemory
from kvplugin.vllm.gpu.requests import NoSource, RequestSource
from kvplugin.vllm.settings import engine_config, wants_rollout

_ENGINES: weakref.WeakValueDictionary[int, GpuEngine] = weakref.WeakValueDictionary()
"""Owner: :func:`gpu_engine`. An entry keeps its state alive, so an id cannot be reused while it is here."""


class GpuEngine:
    """One engine in one worker process.

    Attributes:
        state: hook, counters and export.
        source: who the requests of a batch are; the worker puts itself here.
        conversions: of logical to physical indices, shared in each index group.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.state: EngineState = engine_state(vllm_config)
        self.source: RequestSource = NoSource()
        self.has_arms = wants_rollout(vllm_config)
        config = engine_config(vllm_config)
        grouped = config is not None and config.remap.grouped
        self.conversions = SharedConversions(grouped=grouped, paths=self.state.remap.paths)
        scheduler = vllm_config.scheduler_config
        self.most_rows: int = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs)
        self._config = vllm_config
        self._impls: weakref.WeakSet[Any] = weakref.WeakSet()
        self._storages: frozenset[int] | None = None
        self._memory: RequestMemory | None = None

    @property
    def speaks(self) -> bool:
        """This rank's counters stand for rows that its tensor-parallel group computes alike."""
        return bool(get_tensor_model_parallel_rank() == 0)

    def export(self) -> None:
        """Export the counters, where this rank has some of its own."""
        # Prefill rows may be dealt out to ranks; what the others compute alike, they do not count.
        if self.speaks or self._config.parallel_config.tensor_parallel_size > 1:
            self.state.export()

    def memory(self, device: torch.device) -> RequestMemory:
        """Columns of the batch's requests, which all metadata builders share."""
        if self._memory is None:
            self._memory = RequestMemory(self.most_rows, device)
        return self._memory

    def register(self, impl: Any) -> None:
        """A layer of the engine has this implementation."""
        self._impls.add(impl)
        self._storages = None

    def forget_buffers(self) -> None:
        """Draft models may have been given the target's top-k buffer since the last look."""
        self._storages = None

    def owns(self, selection: Tensor) -> bool:
        """Whether a top-k writes to a buffer of this engine's layers: indexers of other models use the same kernels."""
        if self._storages is None:
            buffers = [impl.topk_indices_buffer for impl in self._impls]
            self._storages = frozenset(b.untyped_storage().data_ptr() for b in buffers if b is not None)
        return selection.untyped_storage().data_ptr() in self._storages

    def buffer(self) -> Tensor:
        """The shared top-k buffer of the target's layers."""
        buffers: Iterator[Tensor] = (impl.topk_indices_buffer for impl in self._impls)
        return next(buffer for buffer in buffers if buffer is not None)

    def is_target(self, layer: str) -> bool:
        """Whether a layer is one of the target's: those of drafts come after them."""
        return bool(extract_layer_index(layer) < self._config.model_config.hf_text_config.num_hidden_layers)

    @property
    def gathers_prefill(self) -> bool:
        """Prefill context parallelism is on, so that prefill rows see the keys of all ranks."""
        return bool(self._config.parallel_config.prefill_context_parallel_size > 1)

    def context_ranks(self) -> ContextParallel:
        """How the KV cache is dealt out; asked when a builder is made, because vLLM settles the interleave late."""
        parallel = self._config.parallel_config
        size = parallel.decode_context_parallel_size
        rank = 0
        if size > 1:
            from vllm.distributed import get_dcp_group

            rank = get_dcp_group().rank_in_group
        return ContextParallel(size, rank, parallel.cp_kv_cache_interleave_size)

    def obstacle(self) -> InactiveReason | None:
        """Why the policy cannot act in this engine, if it cannot."""
        config = engine_config(self._config)
        if getattr(self._config.attention_config, "hisparse_config", None) is not None:
            return InactiveReason.HISPARSE
        if self.context_ranks().size > 1 and (config is None or config.placement is not Placement.BEFORE_TOPK):
            return InactiveReason.NO_SCORES
        return None


def gpu_engine(vllm_config: Any) -> GpuEngine:
    """The object of the engine that a configuration belongs to, made on first use; keep it, or it is gone."""
    state = engine_state(vllm_config)
    engine = _ENGINES.get(id(state))
    if engine is None:
        engine = _ENGINES[id(state)] = GpuEngine(vllm_config)
    return engine
