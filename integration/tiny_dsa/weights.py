"""Random weights under the names the real checkpoints use.

Each tensor depends on the seed and its own name alone, so kinds and patterns that share a name share its values: a DSA
model and the dense one differ in the indexer, in nothing else.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from integration.tiny_dsa import dimensions as dim
from integration.tiny_dsa.spec import ModelKind, TinySpec
from integration.tiny_dsa.tokenizer import readable_tokens

# With unit gains the mean over 64 random values nearly cancels, and the text no longer depends on which tokens were
# selected. These keep attention peaked and its output as large as the residual stream.
QUERY_GAIN = 1.5
VALUE_GAIN = 1.5
OUTPUT_GAIN = 2.0


def model_weights(spec: TinySpec) -> dict[str, Tensor]:
    """All tensors by name: bf16, but fp32 for the indexer's norm and the router's bias, as in the real models."""
    source = _Source(spec.seed)
    source.linear("model.embed_tokens", dim.VOCABULARY, dim.HIDDEN, gain=math.sqrt(dim.HIDDEN))
    for layer in range(spec.layers):
        _layer(source, spec, layer)
    source.norm("model.norm", dim.HIDDEN)
    _output_head(source)
    return source.tensors


class _Source:
    """Draws tensors by name and collects them."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.tensors: dict[str, Tensor] = {}

    def linear(self, name: str, rows: int, columns: int, gain: float = 1.0) -> None:
        """``{name}.weight [rows, columns]``: maps unit-variance input to output of variance ``gain``²."""
        self.tensors[f"{name}.weight"] = (self._normal(name, rows, columns) * (gain / math.sqrt(columns))).bfloat16()

    def norm(self, name: str, size: int) -> None:
        """``{name}.weight [size]``: scattered around 1, so that a dropped norm weight shows."""
        self.tensors[f"{name}.weight"] = (1 + 0.1 * self._normal(name, size)).bfloat16()

    def constant(self, name: str, size: int, value: float) -> None:
        """An fp32 vector ``name [size]`` of one value."""
        self.tensors[name] = torch.full((size,), value)

    def _normal(self, name: str, *shape: int) -> Tensor:
        # NumPy's generators give the same numbers on every CPU; torch's depend on its vector width.
        generator = np.random.default_rng([self._seed, *name.encode()])
        return torch.from_numpy(generator.standard_normal(shape))


def _layer(source: _Source, spec: TinySpec, layer: int) -> None:
    prefix = f"model.layers.{layer}"
    source.norm(f"{prefix}.input_layernorm", dim.HIDDEN)
    source.norm(f"{prefix}.post_attention_layernorm", dim.HIDDEN)
    if spec.kind is ModelKind.LLAMA:
        _plain_attention(source, f"{prefix}.self_attn")
    else:
        _latent_attention(source, f"{prefix}.self_attn")
    if spec.sparsity is not None and spec.sparsity.pattern[layer] == "F":
        _indexer(source, f"{prefix}.self_attn.indexer")
    if spec.kind is ModelKind.LLAMA or layer < dim.dense_mlp_layers(spec.layers):
        _mlp(source, f"{prefix}.mlp", dim.INTERMEDIATE)
    else:
        _experts(source, f"{prefix}.mlp")


def _plain_attention(source: _Source, prefix: str) -> None:
    for projection in ("q_proj", "k_proj"):
        source.linear(f"{prefix}.{projection}", dim.HIDDEN, dim.HIDDEN, QUERY_GAIN)
    source.linear(f"{prefix}.v_proj", dim.HIDDEN, dim.HIDDEN, VALUE_GAIN)
    source.linear(f"{prefix}.o_proj", dim.HIDDEN, dim.HIDDEN, OUTPUT_GAIN)


def _latent_attention(source: _Source, prefix: str) -> None:
    source.linear(f"{prefix}.q_a_proj", dim.Q_LORA_RANK, dim.HIDDEN)
    source.norm(f"{prefix}.q_a_layernorm", dim.Q_LORA_RANK)
    source.linear(f"{prefix}.q_b_proj", dim.HEADS * (dim.QK_NOPE + dim.QK_ROPE), dim.Q_LORA_RANK, QUERY_GAIN)
    source.linear(f"{prefix}.kv_a_proj_with_mqa", dim.KV_LORA_RANK + dim.QK_ROPE, dim.HIDDEN)
    source.norm(f"{prefix}.kv_a_layernorm", dim.KV_LORA_RANK)
    source.linear(f"{prefix}.kv_b_proj", dim.HEADS * (dim.QK_NOPE + dim.V_HEAD), dim.KV_LORA_RANK, VALUE_GAIN)
    source.linear(f"{prefix}.o_proj", dim.HIDDEN, dim.HEADS * dim.V_HEAD, OUTPUT_GAIN)


def _indexer(source: _Source, prefix: str) -> None:
    source.linear(f"{prefix}.wq_b", dim.INDEX_HEADS * dim.INDEX_HEAD, dim.Q_LORA_RANK)
    source.linear(f"{prefix}.wk", dim.INDEX_HEAD, dim.HIDDEN)
    source.constant(f"{prefix}.k_norm.weight", dim.INDEX_HEAD, 1.0)
    source.constant(f"{prefix}.k_norm.bias", dim.INDEX_HEAD, 0.0)
    source.linear(f"{prefix}.weights_proj", dim.INDEX_HEADS, dim.HIDDEN)


def _mlp(source: _Source, prefix: str, width: int) -> None:
    source.linear(f"{prefix}.gate_proj", width, dim.HIDDEN)
    source.linear(f"{prefix}.up_proj", width, dim.HIDDEN)
    source.linear(f"{prefix}.down_proj", dim.HIDDEN, width)


def _experts(source: _Source, prefix: str) -> None:
    source.linear(f"{prefix}.gate", dim.EXPERTS, dim.HIDDEN)
    source.constant(f"{prefix}.gate.e_score_correction_bias", dim.EXPERTS, 0.0)
    for expert in range(dim.EXPERTS):
        _mlp(source, f"{prefix}.experts.{expert}", dim.MOE_INTERMEDIATE)
    _mlp(source, f"{prefix}.shared_experts", dim.MOE_INTERMEDIATE)


def _output_head(source: _Source) -> None:
    """Tokens without readable text get a logit of exactly 0, far below the largest of hundreds of random ones.

    Greedy text is then readable, equal texts mean equal tokens, and no answer ends before ``max_tokens``.
    """
    source.linear("lm_head", dim.VOCABULARY, dim.HIDDEN)
    unreadable = torch.ones(dim.VOCABULARY, dtype=torch.bool)
    unreadable[readable_tokens()] = False
    source.tensors["lm_head.weight"][unreadable] = 0
