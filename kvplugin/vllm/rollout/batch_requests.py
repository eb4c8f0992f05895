"""What a worker keeps of the requests it serves: the arm of each, and the length of its stable prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from kvplugin.requests.keys import ASSIGNED_ARM_KEY, STABLE_PREFIX_KEY
from kvplugin.requests.slots import StepRollout

NO_SLOT = -1
"""Row of the policy table for a request whose arm is not in it: its rows are left alone, and counted."""


class RequestFacts(NamedTuple):
    """Of one request: its arm, None where it has none, and the tokens of its stable prefix."""

    arm: str | None
    stable_prefix: int


STRANGER = RequestFacts(None, 0)


class BatchRequests:
    """The requests of one worker, from the step that brings them to the one that ends them."""

    def __init__(self) -> None:
        self._facts: dict[str, RequestFacts] = {}
        self._slots: dict[str | None, int] = {}

    def __len__(self) -> int:
        return len(self._facts)

    def start(self, request: str, extra_args: Mapping[str, Any] | None) -> None:
        """A request has come; one that comes again, because it was preempted, is a new one."""
        given = extra_args or {}
        self._facts[request] = RequestFacts(given.get(ASSIGNED_ARM_KEY), given.get(STABLE_PREFIX_KEY, 0))

    def finish(self, requests: Iterable[str]) -> None:
        """Requests are over, finished or aborted; unknown ones are no error."""
        for request in requests:
            self._facts.pop(request, None)

    def name_slots(self, step: StepRollout) -> None:
        """Rows of the policy table have other names from now on."""
        self._slots = {arm[0]: slot for slot, arm in enumerate(step.arms) if arm is not None}

    def slots(self, requests: Sequence[str]) -> list[int]:
        """Row of the policy table of each request; :data:`NO_SLOT` where its arm has none."""
        return [self._slots.get(self._facts.get(request, STRANGER).arm, NO_SLOT) for request in requests]

    def stable_prefixes(self, requests: Sequence[str]) -> list[int]:
        """Stable prefix of each request, in tokens; 0 = none."""
        return [self._facts.get(request, STRANGER).stable_prefix for request in requests]
