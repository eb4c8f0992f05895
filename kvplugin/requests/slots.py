"""Arms as rows of a policy table, and the rollout as it travels with each step."""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import TypeAdapter

from kvplugin.config import MOST_ARMS, PolicyConfig
from kvplugin.requests.guard import Guard
from kvplugin.requests.rollout import Rollout
from kvplugin.requests.watch import InForce

ArmInSlot = tuple[str, PolicyConfig]


@dataclass(frozen=True)
class StepRollout:
    """What workers need to know of a rollout.

    Attributes:
        generation: of the engine.
        digest: of the rollout.
        enabled: the kill switch.
        arms: name and policy in each row of the policy table; None = free.
        guard: of the rollout.
    """

    generation: int
    digest: str
    enabled: bool
    arms: tuple[ArmInSlot | None, ...]
    guard: Guard | None = None

    @staticmethod
    def first(found: InForce) -> StepRollout:
        """As an engine that has just started would have it."""
        return StepRollout.of(found, ArmSlots())

    @staticmethod
    def of(found: InForce, slots: ArmSlots) -> StepRollout:
        """What is in force, with its arms in an engine's slots."""
        rollout = found.rollout
        return StepRollout(found.generation, found.digest, rollout.enabled, slots.place(rollout), rollout.guard)

    def encode(self) -> bytes:
        """As JSON."""
        return _ADAPTER.dump_json(self)

    @staticmethod
    def decode(data: bytes) -> StepRollout:
        """What :meth:`encode` made."""
        return _ADAPTER.validate_json(data)


_ADAPTER = TypeAdapter(StepRollout)


class ArmSlots:
    """Rows of the arms of one engine core: an arm keeps its row while it exists.

    Args:
        capacity: rows; no rollout has more arms.
    """

    def __init__(self, capacity: int = MOST_ARMS) -> None:
        self._names: list[str | None] = [None] * capacity
        self._freed = list(range(capacity))

    def place(self, rollout: Rollout) -> tuple[ArmInSlot | None, ...]:
        """Name and policy in each row. Rows that were freed longest ago are taken first."""
        for slot, name in enumerate(self._names):
            if name is not None and name not in rollout.arms:
                self._names[slot] = None
                self._freed.append(slot)
        for name in rollout.arms:
            if name not in self._names:
                self._names[self._freed.pop(0)] = name
        return tuple(None if name is None else (name, rollout.arms[name]) for name in self._names)
