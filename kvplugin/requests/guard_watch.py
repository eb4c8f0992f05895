"""Watches the guarded arms of one engine: from counted signals to the arms whose policy has to go."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from kvplugin.config import Phase
from kvplugin.requests.guard import Guard, GuardCondition, GuardSignal, GuardTrip
from kvplugin.requests.slots import StepRollout


class SignalTotal(NamedTuple):
    """How many values of a signal there were since the engine started, and their sum."""

    values: int
    total: float


ArmTotals = Mapping[tuple[GuardSignal, Phase], SignalTotal]
NOTHING = SignalTotal(0, 0.0)


@dataclass
class _Series:
    """One condition of one arm.

    Attributes:
        start: totals where the window under way began; None = nothing was seen yet.
        means: of the bad windows in a row.
    """

    start: SignalTotal | None = None
    means: list[float] = field(default_factory=list)


class GuardWatch:
    """Thread-safe: one thread says what is in force, another what was counted."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._guard: Guard | None = None
        self._arms: dict[str, str] = {}
        self._series: dict[tuple[str, GuardCondition], _Series] = {}

    def follow(self, step: StepRollout) -> None:
        """Go by another rollout. Arms whose policy is another than before start afresh."""
        guard = step.guard
        guarded = {} if guard is None or not step.enabled else dict(_guarded(guard, step))
        with self._lock:
            same = guard == self._guard
            kept = {name for name, policy in guarded.items() if same and self._arms.get(name) == policy}
            self._guard, self._arms = guard, guarded
            self._series = {key: series for key, series in self._series.items() if key[0] in kept}

    def observe(self, totals: Mapping[str, ArmTotals]) -> dict[str, GuardTrip]:
        """What was counted by arm up to now.

        Returns:
            The arms whose policy has to go, and why. An arm is named once; :meth:`follow` starts it afresh.
        """
        with self._lock:
            guard = self._guard
            if guard is None:
                return {}
            trips: dict[str, GuardTrip] = {}
            for arm in list(self._arms):
                found = totals.get(arm)
                trip = None if found is None else self._look(guard, arm, found)
                if trip is not None:
                    trips[arm] = trip
                    del self._arms[arm]
            return trips

    def retry(self, arms: Mapping[str, GuardTrip]) -> None:
        """These arms' policies could not be taken away: watch them on."""
        with self._lock:
            self._arms |= dict.fromkeys(arms, "")

    def _look(self, guard: Guard, arm: str, totals: ArmTotals) -> GuardTrip | None:
        for condition in guard.conditions:
            series = self._series.setdefault((arm, condition), _Series())
            now = totals.get((condition.signal, condition.phase), NOTHING)
            if series.start is None:
                series.start = now
            count = now.values - series.start.values
            if count < guard.window:
                continue
            mean = (now.total - series.start.total) / count
            series.start = now
            if condition.is_bad(mean):
                series.means.append(mean)
            elif condition.is_clear(mean):
                series.means.clear()
            if len(series.means) >= guard.windows:
                values = ", ".join(f"{value:.3f}" for value in series.means[-guard.windows :])
                reason = f"{condition}: {values} in {guard.windows} windows of {guard.window} values"
                at = datetime.now(UTC).replace(microsecond=0)
                return GuardTrip(reason=reason, at=at, signal=condition.signal, fallback=guard.fallback)
        return None


def _guarded(guard: Guard, step: StepRollout) -> Mapping[str, str]:
    """Name and policy of the arms that the guard is to watch."""
    return {
        name: policy.model_dump_json()
        for name, policy in filter(None, step.arms)
        if policy.mode.selects and name != guard.fallback and (guard.arms is None or name in guard.arms)
    }
