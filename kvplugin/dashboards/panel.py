"""What a dashboard holds, whoever draws it: Grafana, or the static page."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum, unique


@unique
class Unit(StrEnum):
    """Unit of a panel's values, as Grafana spells it."""

    SHARE = "percentunit"
    SECONDS = "s"
    PER_SECOND = "cps"
    COUNT = "short"


@unique
class Kind(StrEnum):
    """How a panel shows its series."""

    LINES = "lines"
    STATE = "state"


@dataclass(frozen=True)
class Query:
    """A PromQL expression and the name of each series it returns, with ``{{label}}`` for the value of a label."""

    expression: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One panel.

    Attributes:
        title: what it shows.
        description: what that is, and what a bad value means.
        queries: one or more.
        unit: of all values.
        kind: lines over time, or the last value in words.
        above: values above it are bad; None = no such bound.
        below: values below it are bad; None = no such bound.
        words: what values mean, where numbers say little.
        only_with: what a server needs to have these series at all; empty = the plugin, a rollout and traffic.
    """

    title: str
    description: str
    queries: tuple[Query, ...]
    unit: Unit
    kind: Kind = Kind.LINES
    above: float | None = None
    below: float | None = None
    words: tuple[tuple[int, str], ...] = ()
    only_with: str = ""


@dataclass(frozen=True)
class Row:
    """Panels under one heading."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A choice at the top of the dashboard, used in expressions as ``$name``.

    Attributes:
        name: in expressions.
        label: for people.
        values: PromQL selector of the series that have the values, and the label that holds them.
        many: whether several may be chosen, or all of them, which is then the default.
        prefer: the value to begin with where only one may be chosen and this is among them.
    """

    name: str
    label: str
    values: tuple[str, str]
    many: bool = True
    prefer: str = ""


@dataclass(frozen=True)
class Dashboard:
    """A dashboard."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    rows: tuple[Row, ...]

    @property
    def panels(self) -> tuple[Panel, ...]:
        """All panels, in order."""
        return tuple(panel for row in self.rows for panel in row.panels)
