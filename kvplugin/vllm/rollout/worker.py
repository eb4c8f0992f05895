"""A worker's part of a rollout: it takes each step's rollout and requests before the step runs."""

from __future__ import annotations

from typing import Any

from kvplugin.requests.slots import StepRollout
from kvplugin.vllm.engine_state import engine_state
from kvplugin.vllm.rollout.batch_requests import BatchRequests
from kvplugin.vllm.rollout.step_message import message_of


class RolloutMethods:
    """Mixed into a worker.

    Attributes:
        kvplugin_requests: what is known of the worker's requests; None where the engine has no rollout.
    """

    kvplugin_requests: BatchRequests | None = None
    _kvplugin_step: StepRollout | None = None
    _kvplugin_generation = 0

    def kvplugin_rollout_status(self) -> dict[str, Any]:
        """What this worker goes by; JSON-able."""
        step = self._kvplugin_step
        if step is None:  # no step has run yet
            return {"generation": 0}
        return {
            "generation": step.generation,
            "digest": step.digest,
            "enabled": step.enabled,
            "requests": 0 if self.kvplugin_requests is None else len(self.kvplugin_requests),
        }

    def execute_model(self, scheduler_output: Any) -> Any:
        """As vLLM's, under the rollout and the arms that the step came with."""
        if self.kvplugin_requests is not None:
            self._kvplugin_begin_step(self.kvplugin_requests, scheduler_output)
        return super().execute_model(scheduler_output)  # type: ignore[misc]

    def _kvplugin_begin_step(self, requests: BatchRequests, scheduler_output: Any) -> None:
        message = message_of(scheduler_output)
        if message is not None and message.generation != self._kvplugin_generation:
            self._kvplugin_generation = message.generation
            step = StepRollout.decode(message.rollout)
            if engine_state(self.vllm_config).begin_rollout(step):  # type: ignore[attr-defined]
                self._kvplugin_step = step
                requests.name_slots(step)
        requests.finish(scheduler_output.finished_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            params = new.sampling_params
            requests.start(new.req_id, None if params is None else params.extra_args)
