"""vLLM's CPU worker, with the parts of sparse attention that its build lacks, and captures of single steps."""

from __future__ import annotations

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from kvplugin.vllm.capture_worker import CaptureMethods
from kvplugin.vllm.cpu.parts import install
from kvplugin.vllm.cpu.requests import RunnerRequests
from kvplugin.vllm.rollout.batch_requests import BatchRequests
from kvplugin.vllm.rollout.worker import RolloutMethods
from kvplugin.vllm.settings import wants_rollout


class KvpluginCpuWorker(RolloutMethods, CaptureMethods, CPUWorker):
    """Puts the CPU parts in place before the model is built, and lets them see the runner's requests."""

    def init_device(self) -> None:
        """As vLLM's, then bind the model runner."""
        super().init_device()
        if wants_rollout(self.vllm_config):
            self.kvplugin_requests = BatchRequests()
        RunnerRequests.bind(self.model_runner, self.kvplugin_requests)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """As vLLM's, after the CPU parts are in place."""
        install()
        super().load_model(*args, **kwargs)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """As vLLM's; a capture keeps the log-probability of what was drawn."""
        if self.kvplugin_capture is None or not self.kvplugin_capture.in_step:
            return super().sample_tokens(grammar_output)
        state = self.model_runner.execute_model_state
        logits = None if state is None or state.logits is None else state.logits.clone()  # sampling writes to them
        output = super().sample_tokens(grammar_output)
        self.step_is_over(logits, output)
        return output
