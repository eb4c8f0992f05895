"""``kvplugin bench engine``: decode steps of one engine, the hook off, on, exported, and looking for signals."""

from __future__ import annotations

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvplugin.config import ROOT_KEY, MetricsConfig, Mode, PolicyConfig
from kvplugin.errors import ArgumentError, EngineMismatch
from kvplugin.metrics.definitions import EXACT, REMAP_INVALID, REMAP_PATHS, SAMPLED
from kvplugin.metrics.export import CounterExporter
from kvplugin.topology import lower
from kvplugin.vllm.backend_names import BACKEND_NAME

WARM_UP_STEPS = 4
BLOCK_TOKENS = 64
BYTES_PER_TOKEN = 24 << 10
"""KV of six layers and two indexers in float32, with room to spare: nothing must be preempted while it is timed."""
LEAST_PREFILL_TOKENS = 512
"""A step prefills at least this many tokens, so this bounds the steps until the last request decodes."""
POLICY = PolicyConfig(mode=Mode.SPARSE_MERGE)
OFF, ON, EXPORTED, SIGNALS = CONTESTANTS = ("off", "on", "exported", "signals")
"""The hook off; on; on while another thread publishes the counters; on with the default rate of signals. Counters are
published at each step here, not four times a second as in service: what that adds here is more than what it adds there.
"""

# The shape of a small GLM-5.2: enough layers for two index groups with followers. Weights are drawn at load time.
MODEL_CONFIG: dict[str, Any] = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "hidden_size": 256,
    "intermediate_size": 512,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 128,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "vocab_size": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "first_k_dense_replace": 4,
    "moe_layer_freq": 1,
    "torch_dtype": "float32",
    "index_head_dim": 128,
    "index_n_heads": 4,
    "index_topk_pattern": "FSSFSS",
    "indexer_rope_interleave": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
}


@dataclass(frozen=True)
class EngineBench:
    """What to run: ``requests`` decode side by side from ``context`` tokens on, ``steps`` steps of each contestant."""

    model: Path | None
    requests: int
    context: int
    index_topk: int
    steps: int

    @property
    def new_tokens(self) -> int:
        """Tokens per request that keep all of them decoding until the last timed step."""
        prefill_steps = self.requests * (self.context // LEAST_PREFILL_TOKENS + 1)
        return prefill_steps + self.decode_steps + 4

    @property
    def decode_steps(self) -> int:
        """Those that warm up, and those that are timed."""
        return WARM_UP_STEPS + len(CONTESTANTS) * self.steps


def run(bench: EngineBench) -> dict[str, list[float]]:
    """Seconds of each decode step, the contestants by turns.

    Raises:
        ArgumentError: the policy's structure does not fit ``index_topk``.
        EngineMismatch: the engine runs without the plugin's hook.
    """
    lower(POLICY, bench.index_topk)
    longest = MODEL_CONFIG["max_position_embeddings"]
    if bench.model is None and bench.context + bench.new_tokens >= longest:
        raise ArgumentError(
            "kvplugin bench engine --context",
            f"{bench.context} prompt tokens and {bench.new_tokens} new ones",
            f"the default model sees at most {longest} tokens",
        )
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would override the size set here
    with tempfile.TemporaryDirectory() as folder:
        return _measure(_start(bench, Path(folder)), bench)


def _start(bench: EngineBench, folder: Path) -> Any:
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return LLM(
        model=str(bench.model or folder),
        load_format="auto" if bench.model else "dummy",
        hf_overrides={"index_topk": bench.index_topk},
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=bench.context + bench.new_tokens + 1,
        max_num_seqs=bench.requests,
        kv_cache_memory_bytes=bench.requests * (bench.context + bench.new_tokens + BLOCK_TOKENS) * BYTES_PER_TOKEN,
        attention_backend=BACKEND_NAME,
        enable_prefix_caching=False,
        seed=0,
        additional_config={ROOT_KEY: {"policy": {"mode": str(POLICY.mode)}, "metrics": {"enabled": False}}},
    ).llm_engine


def _measure(engine: Any, bench: EngineBench) -> dict[str, list[float]]:
    from vllm import SamplingParams

    from kvplugin.vllm.engine_state import engine_state

    state = engine_state(engine.vllm_config)
    hook = state.hook
    if hook is None:
        raise EngineMismatch("kvplugin bench engine", "the engine runs without the policy's hook", "see its log")
    sampling = SamplingParams(max_tokens=bench.new_tokens, temperature=0, ignore_eos=True, detokenize=False)
    for request in range(bench.requests):
        prompt = [(17 * request + 31 * position) % 400 + 8 for position in range(bench.context)]
        engine.add_request(str(request), {"prompt_token_ids": prompt}, sampling)
    answered: set[str] = set()
    while len(answered) < bench.requests:  # prefill, in as many steps as it takes
        answered |= {output.request_id for output in engine.step() if output.outputs[0].token_ids}
    exporter = CounterExporter(
        {
            EXACT: hook.counters,
            SAMPLED: hook.sampled,
            REMAP_PATHS: state.remap.paths[None],
            REMAP_INVALID: state.remap.invalid[None],
        }
    )
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    with ThreadPoolExecutor(1) as publisher:
        for step in range(bench.decode_steps):
            name = CONTESTANTS[step % len(CONTESTANTS)]
            state.hook = None if name == OFF else hook
            hook.signals_every = MetricsConfig().signals_every if name == SIGNALS else 0
            start = time.perf_counter()
            published = publisher.submit(exporter.publish) if name == EXPORTED else None
            engine.step()
            if step >= WARM_UP_STEPS:
                times[name].append(time.perf_counter() - start)
            if published is not None:
                published.result()
    exporter.close()
    state.hook = hook
    return times
