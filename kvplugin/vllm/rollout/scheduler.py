"""vLLM's schedulers with a rollout: what is in force is decided here, once per step, for every rank."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from kvplugin.vllm.rollout.engine import EngineRollout
from kvplugin.vllm.rollout.step_message import attach

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request


class RolloutScheduling:
    """Mixed into a scheduler: salts requests by arm and epoch, and sends the rollout along with each step.

    A request's salt names the epoch of its arm. When an epoch ends, requests that still wait get the new one at once;
    those that run keep the old salt, under which nothing is looked up any more, until they are preempted.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # type: ignore[call-arg]
        self.kvplugin_rollout = EngineRollout(vllm_config)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """As vLLM's, under the rollout that is in force now."""
        rollout = self.kvplugin_rollout
        if rollout.advance():
            # Requests that wait and hold blocks are in another queue: theirs are hashed already.
            for request in self.waiting:  # type: ignore[attr-defined]
                rollout.renew(request)
        output: SchedulerOutput = super().schedule(*args, **kwargs)  # type: ignore[misc]
        attach(output, rollout.message)
        return output

    def add_request(self, request: Request) -> None:
        """As vLLM's; a further part of a request that is there already follows its arm."""
        first = self.requests.get(request.request_id)  # type: ignore[attr-defined]
        self.kvplugin_rollout.admit(request, first)
        super().add_request(request)  # type: ignore[misc]

    def shutdown(self) -> None:
        """As vLLM's."""
        self.kvplugin_rollout.close()
        super().shutdown()  # type: ignore[misc]

    def _preempt_request(self, request: Request, *args: Any, **kwargs: Any) -> None:
        super()._preempt_request(request, *args, **kwargs)  # type: ignore[misc]
        self.kvplugin_rollout.renew(request)


class RolloutScheduler(RolloutScheduling, Scheduler):
    """vLLM's scheduler with a rollout."""


class RolloutAsyncScheduler(RolloutScheduling, AsyncScheduler):
    """vLLM's scheduler for asynchronous steps with a rollout."""
