"""What the plugin adds to each of vLLM's sparse MLA backends: to its implementation, and to its metadata builder."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.config import get_current_vllm_config

from kvplugin.remap.paths import RemapPath
from kvplugin.vllm.gpu.conversions import SharedConversions
from kvplugin.vllm.gpu.engine import gpu_engine
from kvplugin.vllm.gpu.parts import install
from kvplugin.vllm.gpu.self_test import attach_hook


class SharingImpl:
    """Mixed into an implementation: makes its top-k buffer known, and shares conversions in its index group."""

    index_group: Any
    index_group_index: int
    kvplugin_conversions: SharedConversions

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        install()
        vllm_config = get_current_vllm_config()
        self.kvplugin_engine = gpu_engine(vllm_config)
        self.kvplugin_engine.register(self)
        self.kvplugin_conversions = self.kvplugin_engine.conversions

    def forward_mqa(self, q: Any, kv_c_and_k_pe_cache: Tensor, attn_metadata: Any, layer: Any) -> Any:
        """As vLLM's; where it converts for this layer alone, the index group's leader has done so already."""
        batch = attn_metadata.query_start_loc
        with self.kvplugin_conversions.of_layer(self.index_group, self.index_group_index, batch):
            return super().forward_mqa(q, kv_c_and_k_pe_cache, attn_metadata, layer)  # type: ignore[misc]

    def _convert_logical_to_physical_topk(self, logical_topk_indices: Tensor, *args: Any, **kwargs: Any) -> Any:
        """As vLLM's, which converts once for the group; counted."""
        if len(logical_topk_indices) <= len(self.index_group.physical_topk_indices):
            grouped = self.index_group_index == 0
            self.kvplugin_conversions.count(RemapPath.GROUPED if grouped else RemapPath.MEMO)
        return super()._convert_logical_to_physical_topk(logical_topk_indices, *args, **kwargs)  # type: ignore[misc]


class AttachingBuilder:
    """Mixed into a metadata builder: the first one is made once the model stands and no graph is captured yet."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: Any) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)  # type: ignore[call-arg]
        self.kvplugin_engine = gpu_engine(vllm_config)
        self.kvplugin_engine.forget_buffers()
        attach_hook(self.kvplugin_engine, vllm_config)
