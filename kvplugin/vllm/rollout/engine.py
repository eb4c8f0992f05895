"""The rollout of one engine core: what is in force, the salts of its requests, the stable prefixes of its sessions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplugin.metrics.definitions import (
    GUARD_TRIPPED,
    ROLLOUT_ENABLED,
    ROLLOUT_GENERATION,
    ROLLOUT_METRICS,
    ROLLOUT_SHARE,
)
from kvplugin.metrics.host import HostMetrics
from kvplugin.requests.epochs import ArmEpochs
from kvplugin.requests.keys import ASSIGNED_ARM_KEY, STABLE_PREFIX_KEY
from kvplugin.requests.rollout import Rollout
from kvplugin.requests.slots import ArmSlots, StepRollout
from kvplugin.vllm.log import logger
from kvplugin.vllm.rollout.sessions import PrefixSessions
from kvplugin.vllm.rollout.source import Process, watch_rollout
from kvplugin.vllm.rollout.step_message import StepMessage
from kvplugin.vllm.settings import exports_metrics

if TYPE_CHECKING:
    from vllm.v1.request import Request

ADMITTED = "kvplugin_admitted"
"""Attribute of vLLM's ``Request``."""


@dataclass(frozen=True)
class Admitted:
    """What a request came with.

    Attributes:
        arm: the one its front end chose, or the default where it passed none.
        salt: the caller's own cache salt.
    """

    arm: str
    salt: str | None


class EngineRollout:
    """Decides once per step. Used by the scheduler's thread alone; only the watcher has one of its own.

    Attributes:
        message: what the next step carries.
    """

    message: StepMessage

    def __init__(self, vllm_config: Any) -> None:
        self._metrics = metrics = HostMetrics(ROLLOUT_METRICS, exports=exports_metrics(vllm_config))
        self._watcher = watch_rollout(vllm_config, Process.ENGINE, metrics)
        self._epochs, self._slots = ArmEpochs(), ArmSlots()
        self._sessions = PrefixSessions(vllm_config, metrics)
        self._shown: set[str] = set()
        self._generation = 0
        self.advance()
        self._watcher.start()

    @property
    def _rollout(self) -> Rollout:
        return self._watcher.current.rollout

    def advance(self) -> bool:
        """Take up what has been put in force since the last step.

        Returns:
            True if an arm's epoch ended, so that salts have changed.
        """
        found = self._watcher.current
        if found.generation == self._generation:
            return False
        self._generation = found.generation
        rollout = found.rollout
        ended = self._epochs.advance(rollout)
        step = StepRollout.of(found, self._slots)
        self.message = StepMessage(found.generation, step.encode())
        self._report(rollout)
        logger.info(
            "kvplugin: rollout %s in force: %s; arms whose KV is not used again: %s",
            found.digest,
            "enabled" if rollout.enabled else "switched off",
            ", ".join(sorted(ended)) or "none",
        )
        return bool(ended)

    def admit(self, request: Request, first: Request | None = None) -> None:
        """A request enters the engine; ``first`` is the part of it that is there already, if any."""
        params = request.sampling_params
        if params is None:
            return
        given = params.extra_args or {}
        known: Admitted | None = getattr(first, ADMITTED, None)
        arm = known.arm if known is not None else given.get(ASSIGNED_ARM_KEY, self._rollout.default)
        prefix = self._sessions.stable_prefix(request, self._rollout.arms.get(arm))
        params.extra_args = {**given, ASSIGNED_ARM_KEY: arm, STABLE_PREFIX_KEY: prefix}
        if first is None:
            setattr(request, ADMITTED, Admitted(arm, request.cache_salt))
            self.renew(request)

    def renew(self, request: Request) -> None:
        """Salt a request that holds no blocks for its arm's epoch, if that is another one than before."""
        admitted: Admitted | None = getattr(request, ADMITTED, None)
        if admitted is None:
            return
        salt = self._epochs.salt(admitted.salt, admitted.arm)
        if request.cache_salt != salt:
            request.cache_salt = salt
            request.block_hashes.clear()
            request.update_block_hashes()

    def _report(self, rollout: Rollout) -> None:
        self._metrics.set(ROLLOUT_GENERATION, (), self._generation)
        self._metrics.set(ROLLOUT_ENABLED, (), int(rollout.enabled))
        gone, tripped = self._shown - rollout.arms.keys(), self._watcher.current.override.guard or {}
        self._shown |= rollout.arms.keys()
        for arm in self._shown:
            self._metrics.set(ROLLOUT_SHARE, (arm,), 0.0 if arm in gone else rollout.share(arm))
            self._metrics.set(GUARD_TRIPPED, (arm,), int(arm in tripped))

    def close(self) -> None:
        """Stop watching."""
        self._watcher.close()
