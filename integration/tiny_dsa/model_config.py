"""``config.json`` and ``generation_config.json`` of a tiny model."""

from __future__ import annotations

from typing import Any

from integration.tiny_dsa import dimensions as dim
from integration.tiny_dsa.spec import ModelKind, TinySpec
from integration.tiny_dsa.tokenizer import SpecialToken

ARCHITECTURES = {
    ModelKind.V32: ("DeepseekV32ForCausalLM", "deepseek_v32"),
    ModelKind.GLM52: ("GlmMoeDsaForCausalLM", "glm_moe_dsa"),
    ModelKind.DENSE: ("DeepseekV3ForCausalLM", "deepseek_v3"),
    ModelKind.LLAMA: ("LlamaForCausalLM", "llama"),
}


def model_config(spec: TinySpec) -> dict[str, Any]:
    """The model configuration in the form the real checkpoints of ``spec.kind`` use."""
    architecture, model_type = ARCHITECTURES[spec.kind]
    config = {"architectures": [architecture], "model_type": model_type} | _common(spec.layers)
    if spec.kind is not ModelKind.LLAMA:
        config |= _latent_attention() | _experts(spec.layers)
    if spec.sparsity is not None:
        config |= {
            "index_topk": spec.sparsity.index_topk,
            "index_topk_pattern": spec.sparsity.pattern,
            "index_n_heads": dim.INDEX_HEADS,
            "index_head_dim": dim.INDEX_HEAD,
        }
    return config | _rope(spec.kind)


def generation_config() -> dict[str, Any]:
    """Token ids that generation needs; no sampling defaults, so that an engine's own apply."""
    return {f"{token.role}_token_id": token.value for token in SpecialToken}


def _common(layers: int) -> dict[str, Any]:
    return {
        "torch_dtype": "bfloat16",
        "vocab_size": dim.VOCABULARY,
        "hidden_size": dim.HIDDEN,
        "intermediate_size": dim.INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": dim.HEADS,
        "num_key_value_heads": dim.HEADS,
        "hidden_act": "silu",
        "max_position_embeddings": dim.MAX_POSITION,
        "rms_norm_eps": dim.RMS_EPS,
        "initializer_range": 0.02,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
    } | generation_config()


def _latent_attention() -> dict[str, Any]:
    return {
        "q_lora_rank": dim.Q_LORA_RANK,
        "kv_lora_rank": dim.KV_LORA_RANK,
        "qk_rope_head_dim": dim.QK_ROPE,
        "qk_nope_head_dim": dim.QK_NOPE,
        "v_head_dim": dim.V_HEAD,
    }


def _experts(layers: int) -> dict[str, Any]:
    return {
        "n_shared_experts": 1,
        "n_routed_experts": dim.EXPERTS,
        "num_experts_per_tok": dim.EXPERTS_PER_TOKEN,
        "moe_intermediate_size": dim.MOE_INTERMEDIATE,
        "first_k_dense_replace": dim.dense_mlp_layers(layers),
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    }


def _rope(kind: ModelKind) -> dict[str, Any]:
    """One theta for all kinds, so that a DSA model can be compared with the dense one."""
    if kind is ModelKind.GLM52:
        return {
            "rope_parameters": {"rope_type": "default", "rope_theta": dim.ROPE_THETA},
            "indexer_rope_interleave": True,
        }
    return {"rope_theta": dim.ROPE_THETA}
