"""The remap of one engine: its switch, its counters, and the index groups of its layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from torch import Tensor
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.mla.sparse_utils import flat_kv_row_view

from kvplugin.config import RemapConfig
from kvplugin.remap.call import Member
from kvplugin.remap.counters import new_remap_counters
from kvplugin.remap.groups import GroupLayout, Inactive, Placement
from kvplugin.remap.layouts import layout_from_mask
from kvplugin.remap.memo import GroupMemo
from kvplugin.remap.paths import new_path_counters
from kvplugin.vllm.log import info_once, logger, warn_once

NO_LAYERS = GroupLayout(())
BY_NATURE = (Inactive.SINGLETON, Inactive.ORPHAN)
"""What makes a group inactive without anything being wrong."""


class IndexedLayer:
    """What an attention implementation of ours knows about the layer it serves.

    vLLM makes implementations without telling them their layer. Metadata builders know their layers by name, and their
    block table when they build.

    Attributes:
        runs_indexer: the layer has an indexer; otherwise it reads the selection of the last one that has.
        layer: number of the layer; -1 = not bound.
        block_size: tokens per block of its KV cache.
        table: the same for layers that read one block table.
    """

    runs_indexer: bool = False
    layer: int = -1
    block_size: int = 0
    table: Hashable = None

    def bind(self, name: str, block_size: int, table: Hashable) -> None:
        """Tell the implementation which layer it serves, and how that layer's cache is paged."""
        self.layer, self.block_size, self.table = extract_layer_index(name), block_size, table


class EngineRemap:
    """The remap of one engine. Without a configuration each layer converts for itself, as in an engine without us.

    Attributes:
        paths: int64 ``[len(RemapPath)]`` in host memory, how layers came by their physical indices.
        invalid: int64 ``[len(RemapCounter)]`` on the engine's device, slots without a physical row.
    """

    def __init__(self, vllm_config: Any, config: RemapConfig | None) -> None:
        self._vllm_config = vllm_config
        self._grouped = config is not None and config.grouped
        self._memo: GroupMemo | None = None
        self.paths = new_path_counters()
        self.invalid = new_remap_counters(vllm_config.device_config.device_type)

    def expect_layers(self) -> None:
        """Forget where layers' rows lie: a metadata builder was made, and their KV caches are about to be."""
        self._memo = None

    def memo(self, arrange: Callable[[Tensor], Tensor]) -> GroupMemo:
        """The one memo of all layers; ``arrange`` is applied to learned rows before they are converted."""
        if self._memo is None:
            self._memo = GroupMemo(
                self._read_layout, grouped=self._grouped, paths=self.paths, invalid=self.invalid, arrange=arrange
            )
        return self._memo

    def _read_layout(self) -> GroupLayout:
        try:
            layout = read_layout(self._vllm_config)
        except Exception:
            logger.exception("kvplugin: remap: the index groups cannot be told; each layer converts for itself")
            return NO_LAYERS
        layers = sum(len(group.layers) for group in layout.groups)
        info_once(f"kvplugin: remap: {layout.conversions} conversions a step for {layers} layers")
        for group in layout.groups:
            if group.inactive is not None and group.inactive not in BY_NATURE:
                warn_once(f"kvplugin: remap: layers {list(group.layers)} convert one by one: {group.inactive}")
        return layout


def read_layout(vllm_config: Any) -> GroupLayout:
    """The index groups of the layers that this worker has loaded, target and drafts, and where their rows lie.

    Raises:
        ArgumentError: two layers have the same number.
    """
    context = vllm_config.compilation_config.static_forward_context.values()
    layers = sorted(
        (layer for layer in context if isinstance(getattr(layer, "impl", None), IndexedLayer)),
        key=lambda layer: layer.impl.layer,
    )
    first_draft = vllm_config.model_config.hf_text_config.num_hidden_layers
    target = [layer.impl for layer in layers if layer.impl.layer < first_draft]
    layout = layout_from_mask(
        [impl.runs_indexer for impl in target],
        layers=[impl.layer for impl in target],
        mtp_layers=[layer.impl.layer for layer in layers if layer.impl.layer >= first_draft],
    )
    return layout.placed({layer.impl.layer: _placement(layer) for layer in layers if layer.kv_cache.numel()})


def _placement(layer: Any) -> Placement:
    impl: IndexedLayer = layer.impl
    _, stride_rows = flat_kv_row_view(layer.kv_cache, impl.block_size)
    return Placement(Member(stride_rows), impl.block_size, impl.table)
