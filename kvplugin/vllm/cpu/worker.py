"""vLLM's CPU worker, with the parts of sparse attention that its build lacks."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kvplugin.vllm.cpu.parts import install
from kvplugin.vllm.cpu.requests import RunnerRequests


class KvpluginCpuWorker(CPUWorker):
    """Puts the CPU parts in place before the model is built, and lets them see the runner's requests."""

    def init_device(self) -> None:
        """As vLLM's, then bind the model runner."""
        super().init_device()
        RunnerRequests.bind(self.model_runner)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, after the CPU parts are in place."""
        install()
        super().load_model(*args, **kwargs)
