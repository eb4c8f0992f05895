"""A trained model as a checkpoint, in GLM-5.2's form or in DeepSeek-V3.2's, and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from integration.tiny_dsa import dimensions as dim
from integration.tiny_dsa.checkpoint import as_json, write_files
from integration.tiny_dsa.model_config import generation_config, model_config
from integration.tiny_dsa.spec import ModelKind, TinySpec
from integration.tiny_dsa.training.model import HEADS, INDEX_HEADS, PATTERN, TinyModel
from integration.tiny_dsa.training.vocabulary import WORDS
from integration.tiny_dsa.training.word_tokenizer import build_word_tokenizer, word_tokenizer_config

TRAINED = Path(__file__).resolve().parent.parent / "trained"
"""The committed checkpoint: GLM form, bf16; the other form is derived from it."""
INDEX_TOPK = 64


def export(weights: dict[str, Tensor], kind: ModelKind, out: Path, index_topk: int = INDEX_TOPK) -> Path:
    """Write a checkpoint with its tokenizer; files that hold the same bytes already are left alone.

    Args:
        weights: by name, the indexer's rotary dimensions interleaved, as :func:`checkpoint_weights` gives them.
        kind: ``glm52``, or ``v32``, whose indexer has the two halves of its rotary dimensions apart.
        out: directory, made where missing.
        index_topk: budget that the configuration names.

    Returns:
        ``out``.
    """
    tensors = weights if kind is ModelKind.GLM52 else with_halves_apart(weights)
    files = {
        "model.safetensors": save(tensors, metadata={"format": "pt"}),
        "tokenizer.json": build_word_tokenizer().to_str(pretty=True).encode(),
        "tokenizer_config.json": as_json(word_tokenizer_config()),
        "generation_config.json": as_json(generation_config()),
        "config.json": as_json(trained_config(kind, index_topk)),
    }
    return write_files(files, out)


def export_committed(kind: ModelKind, out: Path, index_topk: int = INDEX_TOPK) -> Path:
    """The committed checkpoint in the form of ``kind``, in ``out``."""
    return export(load_file(TRAINED / "model.safetensors"), kind, out, index_topk)


def checkpoint_weights(model: TinyModel) -> dict[str, Tensor]:
    """All tensors by name: bf16, but fp32 for the indexer's norm, as in the real models."""
    return {
        name: (tensor if "k_norm" in name else tensor.bfloat16()).detach().contiguous().clone()
        for name, tensor in model.state_dict().items()
    }


def load_model(weights: dict[str, Tensor]) -> TinyModel:
    """The model of a checkpoint in GLM form, in float32."""
    model = TinyModel()
    model.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
    return model.eval()


def load_committed() -> TinyModel:
    """The committed model, in float32."""
    return load_model(load_file(TRAINED / "model.safetensors"))


def with_halves_apart(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same indexer for an engine that pairs rotary dimension ``i`` with ``i + rope / 2`` instead of ``i + 1``."""
    rotary = torch.arange(dim.QK_ROPE).view(-1, 2).T.flatten()
    order = torch.cat([rotary, torch.arange(dim.QK_ROPE, dim.INDEX_HEAD)])

    def reordered(name: str, tensor: Tensor) -> Tensor:
        if "indexer.wq_b" in name:
            return tensor.view(INDEX_HEADS, dim.INDEX_HEAD, -1)[:, order].reshape(tensor.shape).contiguous()
        if "indexer.wk" in name or "indexer.k_norm" in name:
            return tensor[order].contiguous()
        return tensor

    return {name: reordered(name, tensor) for name, tensor in weights.items()}


def trained_config(kind: ModelKind, index_topk: int) -> dict[str, Any]:
    """``config.json``: the tiny models' own, with this model's sizes."""
    return model_config(TinySpec(kind, len(PATTERN), PATTERN, index_topk)) | {
        "vocab_size": len(WORDS),
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "index_n_heads": INDEX_HEADS,
        "first_k_dense_replace": len(PATTERN),
    }
