"""Puts a rollout into an engine that is configured with one: its scheduler, and the wraps of the front end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.vllm.rollout.source import Process, connector_conflicts, watch_rollout

if TYPE_CHECKING:
    from vllm.config import VllmConfig

SCHEDULERS = {
    False: "kvplugin.vllm.rollout.scheduler.RolloutScheduler",
    True: "kvplugin.vllm.rollout.scheduler.RolloutAsyncScheduler",
}
"""By whether the engine schedules asynchronously."""
STOCK_SCHEDULERS = (
    None,
    "vllm.v1.core.sched.scheduler.Scheduler",
    "vllm.v1.core.sched.async_scheduler.AsyncScheduler",
)


def prepare_rollout(vllm_config: VllmConfig) -> None:
    """Check an engine's rollout and put its parts in place; to be called once asynchronous scheduling is settled.

    Raises:
        ConfigError: the rollout file is bad or does not fit the engine, or something else stands in the way.
    """
    watch_rollout(vllm_config, Process.FRONT_END)
    problems = [*connector_conflicts(vllm_config), *_place_scheduler(vllm_config)]
    if problems:
        raise ConfigError(problems)
    from kvplugin.vllm.rollout import wrap_input_processor, wrap_output_processor, wrap_renderer, wrap_sampling_params

    for wrap in (wrap_input_processor, wrap_output_processor, wrap_renderer, wrap_sampling_params):
        wrap.install()


def _place_scheduler(vllm_config: VllmConfig) -> list[ConfigProblem]:
    scheduling = vllm_config.scheduler_config
    ours = SCHEDULERS[bool(scheduling.async_scheduling)]
    if scheduling.scheduler_cls in STOCK_SCHEDULERS:
        scheduling.scheduler_cls = ours
    elif scheduling.scheduler_cls not in SCHEDULERS.values() and not _is_ours(vllm_config):
        return [
            ConfigProblem(
                "--scheduler-cls",
                f"{scheduling.scheduler_cls!r} beside a rollout",
                f"drop it, or derive it from {ours}",
            )
        ]
    return []


def _is_ours(vllm_config: VllmConfig) -> bool:
    from kvplugin.vllm.rollout.scheduler import RolloutScheduling

    return issubclass(vllm_config.scheduler_config.get_scheduler_cls(), RolloutScheduling)
