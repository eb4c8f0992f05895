"""vLLM's GPU worker, which tells the plugin of its requests, on every rank and with either model runner."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from kvplugin.vllm.gpu.engine import gpu_engine
from kvplugin.vllm.gpu.requests import RunnerRequests
from kvplugin.vllm.rollout.batch_requests import BatchRequests
from kvplugin.vllm.rollout.worker import RolloutMethods
from kvplugin.vllm.settings import wants_rollout


class KvpluginGpuWorker(RolloutMethods, Worker):
    """Lets the plugin see the runner's requests, and exports its counters once graphs are captured."""

    def init_device(self) -> None:
        """As vLLM's, then bind the model runner."""
        super().init_device()
        if wants_rollout(self.vllm_config):
            self.kvplugin_requests = BatchRequests()
        self.kvplugin_engine = gpu_engine(self.vllm_config)
        self.kvplugin_engine.source = RunnerRequests(self.model_runner, self.kvplugin_requests)

    def compile_or_warm_up_model(self) -> Any:
        """As vLLM's; counters are exported from then on: reading them would fail a capture."""
        result = super().compile_or_warm_up_model()
        self.kvplugin_engine.export()
        return result
