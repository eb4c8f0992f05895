"""The guard of a rollout: what an operator lets take an arm's policy away while nobody looks. Models only."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Self

from pydantic import Field, model_validator

from kvplugin.config import Conflict, Phase, Settings, choice, refuse

ARM_NAME = r"^[a-z0-9][a-z0-9_.-]{0,31}$"
"""Arms are label values of metrics and part of HTTP headers."""
ArmName = Annotated[str, Field(pattern=ARM_NAME)]
Ratio = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]


class GuardSignal(StrEnum):
    """An online signal, as rollout files and metrics call it; all of them lie between 0 and 1."""

    SINK_HIT = "sink_hit"
    LOCAL_HIT = "local_hit"
    WITNESS_HIT = "witness_hit"
    EVICTED_SHARE = "evicted_share"
    EVICTION_MARGIN = "eviction_margin"
    STEP_OVERLAP = "step_overlap"
    LEADER_OVERLAP = "leader_overlap"
    VALID_DEFICIT = "valid_deficit"
    INVALID_SHARE = "invalid_share"


class GuardCondition(Settings):
    """A limit to the mean of a signal over a window."""

    signal: Annotated[GuardSignal, choice(GuardSignal)]
    """The signal."""
    phase: Annotated[Phase, choice(Phase)] = Phase.DECODE
    """Phase of the rows that it is taken from."""
    above: Ratio | None = None
    """A window is bad whose mean lies above this; give `above` or `below`."""
    below: Ratio | None = None
    """A window is bad whose mean lies below this."""
    clear: Ratio | None = None
    """Only a window on the good side of this ends a series of bad ones; null = the limit itself."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        return refuse(self, _condition_conflicts(self))

    def is_bad(self, mean: float) -> bool:
        """True for a window beyond the limit."""
        return (self.above is not None and mean > self.above) or (self.below is not None and mean < self.below)

    def is_clear(self, mean: float) -> bool:
        """True for a window that ends a series of bad ones."""
        if self.above is not None:
            return mean <= (self.above if self.clear is None else self.clear)
        assert self.below is not None  # validated above
        return mean >= (self.below if self.clear is None else self.clear)

    def __str__(self) -> str:
        limit = f"above {self.above:g}" if self.above is not None else f"below {self.below:g}"
        return f"{self.phase} {self.signal} {limit}"


def _condition_conflicts(condition: GuardCondition) -> Iterator[Conflict]:
    above, below, clear = condition.above, condition.below, condition.clear
    if (above is None) == (below is None):
        yield "above", "above and below are both missing" if above is None else "given beside below", "give one of them"
    elif clear is not None and ((above is not None and clear > above) or (below is not None and clear < below)):
        yield "clear", f"{clear:g} lies on the bad side of the limit", f"use {_good_side(condition)}"


def _good_side(condition: GuardCondition) -> str:
    return f"at most {condition.above:g}" if condition.above is not None else f"at least {condition.below:g}"


class Guard(Settings):
    """When an arm's policy is taken away."""

    conditions: Annotated[tuple[GuardCondition, ...], Field(min_length=1, max_length=16)]
    """One that holds is enough."""
    window: Annotated[int, Field(ge=1, le=10**6)] = 200
    """Values of a signal that make up a window; one row in `metrics.signals_every` gives one per index group."""
    windows: Annotated[int, Field(ge=1, le=1000)] = 3
    """Bad windows in a row, counting past undecided ones, before the guard acts."""
    fallback: ArmName | None = None
    """Arm whose policy takes the place of the guarded one's; null = its own policy in mode `observe`."""
    arms: Annotated[tuple[ArmName, ...], Field(min_length=1)] | None = None
    """Arms to guard; null = all whose policy changes selections."""


def guard_conflicts(guard: Guard, known: tuple[str, ...]) -> Iterator[Conflict]:
    """Yield (key, found, cure) for arms that a rollout does not have."""
    names = ", ".join(known)
    if guard.fallback is not None and guard.fallback not in known:
        yield "guard.fallback", f"{guard.fallback!r} is an unknown arm", f"use {names}, or leave it out"
    for arm in guard.arms or ():
        if arm not in known:
            yield "guard.arms", f"{arm!r} is an unknown arm", f"use {names}"
        elif arm == guard.fallback:
            yield "guard.arms", f"{arm!r} is the fallback itself", "guard other arms, or name another fallback"


class GuardTrip(Settings):
    """What the guard did to an arm, as the override keeps it until somebody re-arms the arm."""

    reason: Annotated[str, Field(max_length=500)]
    """Condition and values."""
    at: datetime
    """When."""
    signal: Annotated[GuardSignal, choice(GuardSignal)]
    """Signal of the condition."""
    fallback: ArmName | None = None
    """Arm whose policy is in force instead; null = mode `observe`."""
