"""The front end's part of a rollout: every request is checked and given its arm where it enters the engine."""

from __future__ import annotations

import copy
import re
import weakref
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplugin.errors import RequestError
from kvplugin.metrics.definitions import FRONT_END_METRICS, REQUEST_ERRORS, REQUESTS, ArmChoice
from kvplugin.metrics.directory import metrics_directory
from kvplugin.metrics.host import HostMetrics
from kvplugin.requests.assignment import choose_arm
from kvplugin.requests.keys import (
    ASSIGNED_ARM_KEY,
    DERIVED_SCAFFOLD_KEY,
    RequestKeys,
    request_keys,
)
from kvplugin.requests.override import Override
from kvplugin.requests.rollout import Key, Rollout
from kvplugin.vllm.log import logger
from kvplugin.vllm.rollout.arm_echo import note_arm
from kvplugin.vllm.rollout.source import Process, watch_rollout
from kvplugin.vllm.settings import engine_config

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreRequest

_BASES = (
    re.compile(r"(?P<base>.+)-[0-9a-f]+-beam-\d+"),
    re.compile(r"(?P<base>cmpl-.+)-\d+"),
    re.compile(r"(?P<base>resp_.+)_\d+"),
    # Only where the id is vLLM's own: a caller's may well end in a number.
    re.compile(r"(?P<base>chatcmpl-[0-9a-f]{16,})_\d+"),
)
"""How vLLM's entry points name the prompts of one request: beams, prompts of a completion, turns, conversations."""

FRONT_ENDS: weakref.WeakSet[FrontEnd] = weakref.WeakSet()
"""The front ends of this process. Owner: :class:`FrontEnd`."""


def base_request_id(request_id: str) -> str:
    """The id that all prompts of one request have in common."""
    for form in _BASES:
        match = form.fullmatch(request_id)
        if match is not None:
            return match["base"]
    return request_id


class FrontEnd:
    """Gives the requests of one engine their arms, in one front-end process.

    Attributes:
        writable: the override may be changed through this server.
        metrics: of the requests.

    Raises:
        ConfigError: the rollout file is bad, or does not fit the engine.
    """

    def __init__(self, vllm_config: Any) -> None:
        config = engine_config(vllm_config)
        assert config is not None
        self.writable = config.rollout_writable
        self.metrics = (
            _shared_metrics(metrics_directory()) if config.metrics.enabled else HostMetrics((), exports=False)
        )
        self._watcher = watch_rollout(vllm_config, Process.FRONT_END, self.metrics)
        self._watcher.start()
        self.metrics.expect_arms(self.rollout.arms)
        FRONT_ENDS.add(self)
        weakref.finalize(self, self._watcher.close)
        logger.info("kvplugin: %d arms: %s", len(self.rollout.arms), ", ".join(self.rollout.arms))

    @property
    def rollout(self) -> Rollout:
        """What is in force."""
        return self._watcher.current.rollout

    def status(self) -> dict[str, Any]:
        """What is in force, where it comes from, and what is wrong with it; JSON-able."""
        return self._watcher.status()

    def describe(self) -> dict[str, Any]:
        """The rollout in force and the override that stands over the file, as they are at this moment; JSON-able.

        Looked at anew: another front end of the server may have been told of a change an instant ago.
        """
        found = self._watcher.poll()
        return {
            "generation": found.generation,
            "rollout": found.rollout.model_dump(mode="json"),
            "override": None if found.override is None else found.override.model_dump(mode="json", exclude_none=True),
        }

    def put(self, override: Override) -> dict[str, Any]:
        """Put an override in force, in the place of the one before; an empty one clears it.

        Returns:
            See :meth:`describe`.

        Raises:
            ConfigError: the rollout would be bad with it.
            OSError: it cannot be written.
        """
        self._watcher.set_override(override)
        return self.describe()

    def check(self, extra_args: Mapping[str, Any] | None) -> RequestKeys:
        """The plugin's keys of a request.

        Raises:
            RequestError: a key is unknown or its value is no good.
        """
        try:
            return request_keys(extra_args, self.rollout.arms)
        except RequestError as error:
            self.metrics.inc(REQUEST_ERRORS, (error.key,))
            raise

    def enter(self, request: EngineCoreRequest, scaffold_tokens: int = 0) -> None:
        """Give a request its arm, and write it where every process will see it.

        Args:
            request: as made by vLLM, under the id of its caller.
            scaffold_tokens: length of the prompt's leading system and tool part, where the front end rendered it.

        Raises:
            RequestError: see :meth:`check`.
        """
        if request.sampling_params is None:
            return
        params = copy.copy(request.sampling_params)
        keys, rollout = self.check(params.extra_args), self.rollout
        arm, choice = choose(rollout, keys, request.session_id, request.request_id)
        params.extra_args = {
            **(params.extra_args or {}),
            ASSIGNED_ARM_KEY: arm,
            DERIVED_SCAFFOLD_KEY: scaffold_tokens,
        }
        request.sampling_params = params
        self.metrics.inc(REQUESTS, (arm, choice))
        note_arm(arm)


def choose(rollout: Rollout, keys: RequestKeys, session: str | None, request_id: str) -> tuple[str, ArmChoice]:
    """The arm of a request, and what decided it."""
    if keys.arm is not None:
        return keys.arm, ArmChoice.EXPLICIT
    session = keys.session or session
    if rollout.key is Key.SESSION and session:
        return choose_arm(rollout, session), ArmChoice.SESSION
    return choose_arm(rollout, base_request_id(request_id)), ArmChoice.REQUEST


@cache
def _shared_metrics(_directory: Path) -> HostMetrics:
    """The metrics of this process's front ends, kept as long as it lives."""
    return HostMetrics(FRONT_END_METRICS)


def metrics_of_requests() -> HostMetrics:
    """Where requests of this process are counted."""
    front_end = only_front_end()
    return _shared_metrics(metrics_directory()) if front_end is None else front_end.metrics


def only_front_end() -> FrontEnd | None:
    """The one front end of this process; None where there is none, or more than one."""
    found = list(FRONT_ENDS)
    return found[0] if len(found) == 1 else None
