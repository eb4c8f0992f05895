"""What Prometheus evaluates by itself: recording rules and alerts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum, unique


@unique
class Severity(StrEnum):
    """How fast somebody should look."""

    CRITICAL = "critical"
    """Answers are or may be wrong: now."""
    WARNING = "warning"
    """Something does not do what was asked for: today."""


@dataclass(frozen=True)
class Recording:
    """An expression that is evaluated again and again and kept under a name (``level:metric:operations``)."""

    name: str
    expression: str


@dataclass(frozen=True)
class Alert:
    """An alert.

    Attributes:
        name: of the alert, and of its section in the runbook.
        expression: returns a series for each thing that is wrong.
        hold: how long it must stay so.
        severity: how fast somebody should look.
        summary: one line; ``{{ $labels.instance }}`` and the like are filled in.
        labels: more labels, to tell alerts of one name apart.
    """

    name: str
    expression: str
    hold: str
    severity: Severity
    summary: str
    labels: Mapping[str, str] = field(default_factory=dict)
