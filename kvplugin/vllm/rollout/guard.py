"""The guard in a worker: what it counts decides, and the override carries the decision to every process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvplugin.errors import KvpluginError
from kvplugin.metrics.definitions import GUARD_FAILURES, GUARD_METRICS, GUARD_TRIPS
from kvplugin.metrics.host import HostMetrics
from kvplugin.metrics.series import Snapshot
from kvplugin.requests.guard import GuardSignal, GuardTrip
from kvplugin.requests.guard_watch import ArmTotals, GuardWatch, SignalTotal
from kvplugin.requests.override import Override, update_override
from kvplugin.requests.slots import StepRollout
from kvplugin.topology.counters import PHASE_ROWS
from kvplugin.topology.signals import UNIT, Signal, columns_of
from kvplugin.vllm.log import logger
from kvplugin.vllm.rollout.source import state_path
from kvplugin.vllm.settings import engine_config, exports_metrics


class EngineGuard:
    """Takes arms' policies away by itself.

    The policy goes from every rank, and from every engine over the same files, as if an operator had taken it away: a
    trip is written into the override. Until it is taken out again nothing gives the policy back.

    Args:
        vllm_config: of an engine with a rollout.
        step: the rollout that the engine starts with.
    """

    def __init__(self, vllm_config: Any, step: StepRollout) -> None:
        config = engine_config(vllm_config)
        assert config is not None
        self._override = state_path(config)
        self._metrics = HostMetrics(GUARD_METRICS, exports=exports_metrics(vllm_config))
        self._watch = GuardWatch()
        self._names: tuple[str | None, ...] = ()
        self.follow(step)

    def follow(self, step: StepRollout) -> None:
        """Go by another rollout."""
        self._names = tuple(None if arm is None else arm[0] for arm in step.arms)
        self._metrics.expect_arms(name for name in self._names if name is not None)
        self._watch.follow(step)

    def look(self, snapshots: Sequence[Snapshot]) -> None:
        """See what the signals hold now, by slot, and act. Nothing here raises."""
        totals = {name: totals_of(cells) for name, cells in zip(self._names, snapshots, strict=False) if name}
        trips = self._watch.observe(totals)
        if trips:
            self._take_away(trips)

    def _take_away(self, trips: Mapping[str, GuardTrip]) -> None:
        added: dict[str, GuardTrip] = {}

        def change(old: Override) -> Override:
            known = old.guard or {}
            added.update({arm: trip for arm, trip in trips.items() if arm not in known})
            return old.model_copy(update={"guard": known | added})

        try:
            update_override(self._override, change)
        except (OSError, KvpluginError) as error:
            for arm, trip in trips.items():
                logger.error("kvplugin: guard: %s should fall back (%s) and cannot: %s", arm, trip.reason, error)
                self._metrics.inc(GUARD_FAILURES, (arm,))
            self._watch.retry(trips)
            return
        for arm, trip in added.items():
            fallback = f"the policy of {trip.fallback}" if trip.fallback else "observe"
            logger.warning("kvplugin: guard: %s falls back to %s: %s", arm, fallback, trip.reason)
            self._metrics.inc(GUARD_TRIPS, (arm, trip.signal))


def totals_of(snapshot: Snapshot) -> ArmTotals:
    """What one arm's signals hold: ``[2][len(SignalColumn)]``, row 0 prefill and row 1 decode."""
    found = {}
    for signal in Signal:
        *buckets, total = columns_of(signal)
        for row, phase in zip(snapshot, PHASE_ROWS, strict=True):
            values = SignalTotal(sum(row[column] for column in buckets), row[total] / UNIT)
            found[GuardSignal(signal.name.lower()), phase] = values
    return found
