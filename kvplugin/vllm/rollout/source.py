"""Where an engine's processes get their rollout from: one watcher each, over the same two files."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any

from kvplugin.config import ROOT_KEY, KvpluginConfig
from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.metrics.definitions import ROLLOUT_RELOAD_FAILURES
from kvplugin.metrics.host import HostMetrics
from kvplugin.requests.fits import engine_conflicts, most_listed
from kvplugin.requests.override import default_state_path
from kvplugin.requests.rollout import Rollout
from kvplugin.requests.watch import RolloutWatcher
from kvplugin.vllm.settings import engine_config

SALTED_CONNECTORS = ("OffloadingConnector",)
"""KV connectors that find blocks by the engine's own block hashes, which a request's salt is part of."""


class Process(StrEnum):
    """Who watches."""

    FRONT_END = "frontend"
    ENGINE = "engine"
    WORKER = "worker"


def state_path(config: KvpluginConfig) -> Path:
    """Where the runtime override is kept."""
    assert config.rollout is not None
    return Path(config.rollout_state) if config.rollout_state else default_state_path(Path(config.rollout))


def watch_rollout(vllm_config: Any, process: Process, metrics: HostMetrics | None = None) -> RolloutWatcher:
    """A watcher over the rollout of an engine that has one, not started yet.

    Args:
        vllm_config: of the engine.
        process: who watches.
        metrics: where failures are counted.

    Raises:
        ConfigError: the rollout file is bad, or does not fit the engine.
    """
    config = engine_config(vllm_config)
    assert config is not None
    assert config.rollout is not None
    width = vllm_config.model_config.hf_text_config.index_topk
    started_with: list[int] = []

    def check(rollout: Rollout) -> None:
        problems = list(
            engine_conflicts(
                rollout, placement=config.placement, width=width, longest_list=next(iter(started_with), None)
            )
        )
        if rollout.guard is not None and not (config.metrics.enabled and config.metrics.signals_every):
            cure = f"set {ROOT_KEY}.metrics.enabled and {ROOT_KEY}.metrics.signals_every, or drop the guard"
            problems.append(ConfigProblem("rollout.guard", "given where no signals are taken", cure))
        if problems:
            raise ConfigError(problems)

    def count(problem: str) -> None:
        if metrics is not None:
            metrics.inc(ROLLOUT_RELOAD_FAILURES, (process,))

    watcher = RolloutWatcher(Path(config.rollout), state_path(config), check=check, on_failure=count)
    started_with.append(most_listed(watcher.current.rollout, width))
    return watcher


def connector_conflicts(vllm_config: Any) -> list[ConfigProblem]:
    """What stands against arms in the engine's KV transfer: a connector that would mix their KV."""
    transfer = vllm_config.kv_transfer_config
    connector = None if transfer is None else transfer.kv_connector
    if connector is None or connector in SALTED_CONNECTORS:
        return []
    return [
        ConfigProblem(
            f"{ROOT_KEY}.rollout",
            f"arms beside the KV connector {connector!r}, which finds KV by tokens alone and would mix theirs",
            f"use {', '.join(SALTED_CONNECTORS)} or no connector, or serve without a rollout",
        )
    ]
