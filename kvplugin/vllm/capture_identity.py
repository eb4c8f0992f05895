"""What every record of a capture says about its engine: names, hidden size, and the rotation of each layer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import vllm
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.models.utils import extract_layer_index

from kvplugin.replay import RopeLayout, RopeRecord
from kvplugin.vllm.backend_names import BACKEND_NAME
from kvplugin.vllm.engine_remap import IndexedLayer
from kvplugin.vllm.settings import describe, engine_config


class LayerRotation(NamedTuple):
    """How queries and keys of one layer are rotated before a capture sees them; the indexer has its own rotation."""

    attention: RopeRecord
    indexer: RopeRecord | None


class EngineIdentity(NamedTuple):
    """One engine.

    Attributes:
        engine: vLLM's version.
        model: name, architecture and dtype; of a local checkpoint the folder's name alone.
        policy: the one in force.
        backend: name of the attention backend.
        rotations: by layer number, for every layer that can be captured.
    """

    engine: str
    model: str
    policy: str
    backend: str
    hidden_size: int
    rotations: dict[int, LayerRotation]


def read_identity(vllm_config: Any, model: torch.nn.Module) -> EngineIdentity:
    """The identity of the engine that runs ``model``; no rotations where no layer can be captured."""
    config = vllm_config.model_config
    text = config.hf_text_config
    ours = engine_config(vllm_config)
    policy = "no policy" if ours is None else describe(ours, text.index_topk)
    dtype = str(config.dtype).removeprefix("torch.")
    rotations = dict(_rotations(model, config.dtype))
    return EngineIdentity(
        f"vLLM {vllm.__version__}",
        f"{Path(config.model).name} ({', '.join(config.architectures)}, {dtype})",
        policy,
        BACKEND_NAME,
        text.hidden_size,
        rotations,
    )


def _rotations(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[tuple[int, LayerRotation]]:
    for module in model.modules():
        if isinstance(module, MultiHeadLatentAttentionWrapper) and isinstance(module.mla_attn.impl, IndexedLayer):
            indexer = None if module.indexer_rope_emb is None else _record(module.indexer_rope_emb, dtype, first=True)
            yield (
                extract_layer_index(module.mla_attn.layer_name),
                LayerRotation(_record(module.rotary_emb, dtype, first=False), indexer),
            )


def _record(rotary: Any, dtype: torch.dtype, *, first: bool) -> RopeRecord:
    layout = RopeLayout.NEOX if rotary.is_neox_style else RopeLayout.INTERLEAVED
    return RopeRecord(float(rotary.base), layout, rotary.rotary_dim, q_dtype=dtype, k_dtype=dtype, rotary_first=first)
