"""What the plugin holds for one engine in one worker process: its hook, its remap, the export of their counters."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvplugin.config import KvpluginConfig, Mode, PolicyConfig
from kvplugin.errors import KvpluginError
from kvplugin.metrics.definitions import (
    ACTIVE,
    EXACT,
    PREFIX,
    REMAP_INVALID,
    REMAP_PATHS,
    SAMPLED,
    SIGNALS,
    ActiveState,
    InactiveReason,
)
from kvplugin.metrics.export import CounterExporter
from kvplugin.metrics.metric import Buffer
from kvplugin.metrics.series import Snapshot
from kvplugin.metrics.status import report_active
from kvplugin.remap import RemapCounter
from kvplugin.requests.slots import StepRollout
from kvplugin.topology import BYPASS_REASONS, Counter
from kvplugin.vllm.engine_remap import EngineRemap
from kvplugin.vllm.hook import PolicyHook, TopkFunction
from kvplugin.vllm.log import logger, warn_once
from kvplugin.vllm.rollout.guard import EngineGuard
from kvplugin.vllm.rollout.source import Process, watch_rollout
from kvplugin.vllm.self_test import SelectRows, run_self_test
from kvplugin.vllm.settings import engine_config

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata

    from kvplugin.vllm.capture import GuardedRecorder, StepCapture

_ENGINES: weakref.WeakValueDictionary[int, EngineState] = weakref.WeakValueDictionary()
"""Owner: :func:`engine_state`. An entry keeps its configuration alive, so an id cannot be reused while it is here."""


class EngineState:
    """The plugin's part of one engine.

    Attributes:
        hook: the policy at the top-k stage, or None where nothing is to be computed.
        remap: the translation of selections into rows of the KV pool.
        capture: the capture that waits for a step, or None.
    """

    def __init__(self, vllm_config: Any) -> None:
        self.hook: PolicyHook | None = None
        self.capture: StepCapture | None = None
        self._exporter: CounterExporter | None = None
        self._arms: list[str | None] | None = None
        self._vllm_config = vllm_config
        self._guard: EngineGuard | None = None
        self._leaders = 0
        self._outcome: ActiveState | None = None
        self._exporting = False
        self._config: KvpluginConfig | None = engine_config(vllm_config)
        self.remap = EngineRemap(vllm_config, None if self._config is None else self._config.remap)

    def attach(
        self,
        device: torch.device,
        width: int,
        select_rows: SelectRows,
        topk: TopkFunction,
        *,
        obstacle: InactiveReason | None = None,
    ) -> int:
        """Build the hook and prove that it fires. Every indexer calls; the first one counts.

        A policy that does not work here is reported and switched off; the engine goes on.

        Args:
            device: of the top-k buffer.
            width: K of the top-k buffer.
            select_rows: the indexer's top-k stage, which looks at ``hook``.
            topk: its top-k alone.
            obstacle: why the hook cannot work in this engine, if it cannot.

        Returns:
            Ordinal of the indexer that calls, among the engine's.
        """
        leader, self._leaders = self._leaders, self._leaders + 1
        if self._outcome is not None:
            return leader
        self._outcome = self._activate(device, width, select_rows, topk, obstacle)
        if self._outcome != ACTIVE:
            self.hook = None
            logger.warning("kvplugin: inactive: %s", self._outcome)
        return leader

    def export(self) -> None:
        """Say how it went, and export the counters from now on; for processes that speak for others too.

        To be called once the engine has captured its graphs. Does nothing the second time.
        """
        if self._outcome is not None and not self._exporting:
            self._exporting = True
            self._export(self._outcome)

    def begin_rollout(self, step: StepRollout) -> bool:
        """Go by another rollout from the next step on.

        Returns:
            False where it cannot be followed; the one before stays in force then, here as on every other rank.
        """
        if self.hook is None:
            return False
        try:
            self.hook.set_policies(_policies(step), enabled=step.enabled)
        except Exception:
            logger.exception("kvplugin: the rollout cannot be followed; the policies before it stay in force")
            return False
        if self._exporter is not None:
            self._exporter.rename_arms(_names(step))
        if self._guard is not None:
            self._guard.follow(step)
        return True

    def recorder(self, common: CommonAttentionMetadata) -> GuardedRecorder | None:
        """Who records the step of a batch that is being described; None unless a capture waits for this very step."""
        return None if self.capture is None else self.capture.begin_step(common)

    def _activate(
        self,
        device: torch.device,
        width: int,
        select_rows: SelectRows,
        topk: TopkFunction,
        obstacle: InactiveReason | None,
    ) -> ActiveState:
        if self._config is None:
            return InactiveReason.NOT_CONFIGURED
        if self._config.policy.mode is Mode.DISABLED and self._config.rollout is None:
            return InactiveReason.POLICY_DISABLED
        if obstacle is not None:
            return obstacle
        try:
            policies: list[PolicyConfig | None] = [self._config.policy]
            if self._config.rollout is not None:
                # The file as this worker finds it, until the first step brings what is in force.
                first = StepRollout.first(watch_rollout(self._vllm_config, Process.WORKER).current)
                policies, self._arms = _policies(first), _names(first)
                self._guard = EngineGuard(self._vllm_config, first)
            metrics = self._config.metrics
            self.hook = PolicyHook(
                policies,
                self._config.placement,
                metrics.sample_every,
                width,
                device,
                topk,
                signals_every=metrics.signals_every if metrics.enabled else 0,
                leaders=self._vllm_config.model_config.hf_text_config.num_hidden_layers if metrics.signals_every else 0,
            )
            rows = run_self_test(self.hook, select_rows, topk)
        except KvpluginError as error:
            logger.error("kvplugin: %s", error)
            return InactiveReason.SELF_TEST_FAILED
        except Exception:
            logger.exception("kvplugin: the self-test could not run")
            return InactiveReason.SELF_TEST_FAILED
        logger.info("kvplugin: self-test passed: the hook fired on %d synthetic rows of width %d", rows, width)
        return ACTIVE

    def _export(self, state: ActiveState) -> None:
        if self._config is not None and not self._config.metrics.enabled:
            return
        report_active(state)
        if self._config is not None:
            self._exporter = CounterExporter(self._counters(), arms=self._arms, on_change=self._take_note)
            self._exporter.start()
            weakref.finalize(self, self._exporter.close)

    def _take_note(self, buffer: Buffer, snapshots: Sequence[Snapshot]) -> None:
        """Called from the exporter's thread with what a buffer holds, by arm."""
        if buffer is SIGNALS and self._guard is not None:
            self._guard.look(snapshots)
        _warn_about(buffer, [[sum(cell) for cell in zip(*rows, strict=True)] for rows in zip(*snapshots, strict=True)])

    def _counters(self) -> dict[Buffer, Tensor]:
        found = {REMAP_PATHS: self.remap.paths[None], REMAP_INVALID: self.remap.invalid[None]}
        if self.hook is not None:
            found |= {EXACT: self.hook.counters, SAMPLED: self.hook.sampled, SIGNALS: self.hook.signals}
            if self._arms is not None:
                found[PREFIX] = self.hook.prefix_counters
        return found


def _policies(step: StepRollout) -> list[PolicyConfig | None]:
    return [None if arm is None else arm[1] for arm in step.arms]


def _names(step: StepRollout) -> list[str | None]:
    return [None if arm is None else arm[0] for arm in step.arms]


def _warn_about(buffer: Buffer, snapshot: Snapshot) -> None:
    """One warning per process and reason for what should not be; rows outside the configured phases are meant to be."""
    if buffer in (EXACT, SAMPLED):
        for name, counter in BYPASS_REASONS.items():
            if counter is not Counter.BYPASS_PHASE and any(row[counter] for row in snapshot):
                warn_once(f"kvplugin: rows are bypassed: {name}; kvplugin_policy_bypass_total counts them")
    elif buffer is REMAP_INVALID:
        for reason in RemapCounter:
            if snapshot[0][reason]:
                warn_once(
                    f"kvplugin: remap: indices without a row in the KV pool: {reason.name.lower()}; "
                    "kvplugin_remap_invalid_total counts them"
                )


def engine_state(vllm_config: Any) -> EngineState:
    """The state of the engine that a configuration belongs to, made on first use.

    Target and draft models of one engine have different configurations that share their compilation configuration.
    """
    key = id(vllm_config.compilation_config)
    state = _ENGINES.get(key)
    if state is None:
        state = _ENGINES[key] = EngineState(vllm_config)
    return state
