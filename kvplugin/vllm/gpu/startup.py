"""What happens to the configuration of an engine that is to serve sparse attention on CUDA GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplugin.vllm.rollout.startup import prepare_rollout
from kvplugin.vllm.settings import wants_rollout
from kvplugin.vllm.startup import announce, place_worker, serve_metrics

if TYPE_CHECKING:
    from vllm.config import VllmConfig

WORKER_PATH = "kvplugin.vllm.gpu.worker.KvpluginGpuWorker"
STOCK_WORKERS = ("auto", "vllm.v1.worker.gpu_worker.Worker")


def prepare_engine(vllm_config: VllmConfig) -> None:
    """Validate the plugin's configuration against the model, announce it, and put the plugin's worker in place.

    Raises:
        ConfigError: a wrong setting, or one that does not fit the model's top-k width.
    """
    config = announce(vllm_config, "sparse attention as without the plugin")
    serve_metrics(config)
    place_worker(vllm_config, WORKER_PATH, STOCK_WORKERS)
    if wants_rollout(vllm_config):
        prepare_rollout(vllm_config)
