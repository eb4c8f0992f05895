"""The rollout: named policies, and the share of the traffic that each one gets. A file, validated whole."""

from __future__ import annotations

import math
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from kvplugin.config import MOST_ARMS, Conflict, PolicyConfig, Settings, choice, refuse, validated
from kvplugin.errors import ConfigError, ConfigProblem
from kvplugin.requests.guard import ArmName, Guard, guard_conflicts
from kvplugin.requests.text import read_mapping

ROOT = "rollout"
"""What keys are named after in messages."""
SUM_TOLERANCE = 1e-6


class Key(StrEnum):
    """What a request's arm is chosen by."""

    SESSION = "session"
    REQUEST = "request"


def _number(value: object) -> object:
    if isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
        raise PydanticCustomError("count", "{found} is not a share; use a number from 0 to 1", {"found": repr(value)})
    return value


Share = Annotated[float, BeforeValidator(_number), Field(ge=0, le=1)]
Arms = dict[ArmName, PolicyConfig]
Shares = dict[ArmName, Share]


class Rollout(Settings):
    """Arms and their shares, as a rollout file gives them."""

    enabled: bool = True
    """`false` = the kill switch: every arm behaves as if its mode were `disabled`."""
    arms: Annotated[Arms, Field(min_length=1, max_length=MOST_ARMS)]
    """Policies by name; a name has up to 32 of a-z, 0-9, `_`, `.`, `-`."""
    shares: Shares = Field(default_factory=dict)
    """Fraction of the traffic by arm, 1 in all; arms left out get 0. Nothing given = all to `default_arm`."""
    key: Annotated[Key, choice(Key)] = Key.SESSION
    """What an arm is chosen by: the session where a request names one, or always the request."""
    default_arm: ArmName | None = None
    """Arm of requests that nothing else decides; may be left out with a single arm."""
    guard: Guard | None = None
    """When an arm's policy is taken away without anybody asking; see docs/ab.md."""

    @model_validator(mode="after")
    def _rules(self) -> Self:
        return refuse(self, rollout_conflicts(self))

    @property
    def default(self) -> str:
        """Name of the default arm."""
        return self.default_arm or next(iter(self.arms))

    def share(self, arm: str) -> float:
        """Fraction of the traffic that an arm gets."""
        return self.shares.get(arm, 0.0) if self.shares else float(arm == self.default)


def rollout_conflicts(rollout: Rollout) -> Iterator[Conflict]:
    """Yield (key, found, cure) for what does not fit together in a rollout."""
    known = ", ".join(rollout.arms)
    for arm in rollout.shares:
        if arm not in rollout.arms:
            yield f"shares.{arm}", "unknown arm", f"use {known}"
    total = math.fsum(rollout.shares.values())
    if rollout.shares and abs(total - 1) > SUM_TOLERANCE:
        yield "shares", f"add up to {total:.6g}", "make them add up to 1"
    if rollout.default_arm is None and len(rollout.arms) > 1:
        yield "default_arm", "missing", f"name one of {known}"
    elif rollout.default_arm is not None and rollout.default_arm not in rollout.arms:
        yield "default_arm", f"{rollout.default_arm!r} is an unknown arm", f"use {known}"
    if rollout.guard is not None:
        yield from guard_conflicts(rollout.guard, tuple(rollout.arms))


def parse_rollout(text: str, source: str) -> Rollout:
    """Read a rollout file's text, YAML or JSON.

    Args:
        text: the whole file.
        source: how messages call it.

    Raises:
        ConfigError: listing everything that is wrong with it.
    """
    return rollout_of(read_mapping(text, source))


def read_rollout(path: Path) -> Rollout:
    """Read a rollout file.

    Raises:
        ConfigError: it cannot be read, or is bad.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise ConfigError([ConfigProblem(str(path), found, "give a readable rollout file")]) from None
    return parse_rollout(text, str(path))


def rollout_of(raw: Any) -> Rollout:
    """Validate a rollout given as a mapping.

    Raises:
        ConfigError: listing everything that is wrong with it.
    """
    return validated(Rollout, raw, ROOT, "arms")
