"""What happens to the configuration of an engine that is to serve sparse attention on a CPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.vllm.backend_names import BACKEND_NAME
from kvplugin.vllm.startup import announce, place_worker, serve_metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER_PATH = "kvplugin.vllm.cpu.worker.KvpluginCpuWorker"
STOCK_WORKERS = ("auto", "vllm.v1.worker.cpu_worker.CPUWorker")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16")
"""What the CPU implementation stores; vLLM does not ask a CPU backend for it."""


def prepare_engine(vllm_config: VllmConfig) -> None:
    """Validate the plugin's configuration against the model, announce it, and put the plugin's worker in place.

    Raises:
        ConfigError: a wrong setting, or one that does not fit the model's top-k width.
    """
    config = announce(vllm_config, "sparse attention on the CPU, without a policy")
    cache_dtype = vllm_config.cache_config.cache_dtype
    if cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(
            [
                ConfigProblem(
                    "--kv-cache-dtype",
                    f"{cache_dtype!r} beside --attention-backend {BACKEND_NAME} on a CPU",
                    f"use {', '.join(KV_CACHE_DTYPES)}",
                )
            ]
        )
    serve_metrics(config)
    place_worker(vllm_config, WORKER_PATH, STOCK_WORKERS)
